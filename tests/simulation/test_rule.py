import random

import pytest

from coordinator.simulation.rules.least_value import LeastValue


def test_the_least_is_known_whatever_comes_and_goes() -> None:
    generator = random.Random(0)
    values, plain, floor = LeastValue(), [], 0
    for _ in range(3000):
        if plain and generator.random() < 0.5:
            gone = generator.choice(plain)
            plain.remove(gone)
            values.remove(gone)
        else:
            floor += generator.randrange(3)
            plain.append(floor)
            values.add(floor)
        assert len(values) == len(plain)
        assert values.least(-1) == min(plain, default=-1)


def test_what_is_not_there_cannot_go() -> None:
    values = LeastValue()
    values.add(3)
    with pytest.raises(KeyError):
        values.remove(2)
