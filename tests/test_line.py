"""A line that one may leave from anywhere."""

import random

import pytest

from coordinator.line import Line, Place


class Person(Place):
    """Stands in line."""


@pytest.fixture
def line() -> Line[Person]:
    return Line()


def test_those_at_the_end_come_last_and_those_put_in_front_first(line: Line[Person]) -> None:
    first, second, third = (Person() for _ in range(3))
    line.append(second)
    line.append(third)
    line.push_front(first)
    assert list(line) == [first, second, third]
    assert [line.pop_front() for _ in range(3)] == [first, second, third]
    assert not line


def test_whoever_left_stands_nowhere_and_may_come_again(line: Line[Person]) -> None:
    person = Person()
    assert not person.is_in_line
    for leave in (line.remove, lambda _: line.pop_front()):
        line.append(person)
        assert person.is_in_line
        assert line
        leave(person)
        assert not person.is_in_line
        assert (person.ahead, person.behind) == (None, None)
        assert not line


@pytest.mark.parametrize("seed", range(3))
def test_a_line_stays_in_order_whoever_leaves_from_the_middle(line: Line[Person], seed: int) -> None:
    chance = random.Random(seed)
    expected: list[Person] = []
    for _ in range(500):
        match chance.choice(["append", "push_front", "remove", "remove", "pop_front"]) if expected else "append":
            case "append":
                expected.append(Person())
                line.append(expected[-1])
            case "push_front":
                expected.insert(0, Person())
                line.push_front(expected[0])
            case "remove":
                line.remove(expected.pop(chance.randrange(len(expected))))
            case "pop_front":
                assert line.pop_front() is expected.pop(0)
        assert list(line) == expected
        assert bool(line) is bool(expected)
