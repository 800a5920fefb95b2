import random

import pytest

from coordinator.simulation.rules import IntegerMultiset


def test_the_minimum_is_that_of_the_integers_present() -> None:
    generator = random.Random(0)
    values, plain, floor = IntegerMultiset(), [], 0
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
        assert values.minimum(-1) == min(plain, default=-1)


def test_an_integer_that_is_not_present_cannot_be_removed() -> None:
    values = IntegerMultiset()
    values.add(3)
    with pytest.raises(KeyError):
        values.remove(2)
