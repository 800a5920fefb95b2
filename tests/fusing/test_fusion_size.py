"""How many closures are worth running in one call: values in, a number out."""

import pytest

from coordinator.fusing.fusion_size import FusionSizeModel

ENOUGH = 10_000


def train(model: FusionSizeModel, overhead: float, each: float, calls: int, making: float = 0.0) -> list[int]:
    """Runs calls that take `overhead + steps * each` seconds, the first of each size `steps * making` more."""
    sizes: list[int] = []
    for _ in range(calls):
        steps = model.steps("step", ENOUGH)
        model.record("step", steps, overhead + steps * (each if steps in sizes else each + making))
        sizes.append(steps)
    return sizes


def test_a_function_that_was_not_run_yet_runs_alone() -> None:
    assert FusionSizeModel(None).steps("step", ENOUGH) == 1


def test_short_steps_are_fused_until_the_call_takes_a_fortieth_of_the_time() -> None:
    overhead, each = 1e-3, 1e-3
    size = max(train(FusionSizeModel(None), overhead, each, 200))
    assert overhead / (overhead + size * each) <= 1 / 40
    assert overhead / (overhead + size / 2 * each) > 1 / 40


def test_more_than_is_wanted_is_brought_together_if_it_is_made_and_not_too_long() -> None:
    model = FusionSizeModel(None)
    each = 0.05
    assert max(train(model, 0.02, each, 200)) == 4
    # Two would be enough now, and are not made.
    assert train(model, 0.0025, each, 400)[-30:].count(4) >= 29
    # Four would take too long.
    assert set(train(model, 0.004, 0.12, 400)[-30:]) == {1}


def test_steps_that_take_next_to_nothing_are_brought_together_up_to_a_limit() -> None:
    assert max(train(FusionSizeModel(None), 1e-3, 0.0, 200)) == 64


def test_long_steps_run_alone() -> None:
    assert set(train(FusionSizeModel(None), 1e-3, 0.1, 100)) == {1}


def test_no_call_takes_longer_than_a_few_hundred_milliseconds() -> None:
    overhead, each = 0.02, 0.02
    assert overhead + max(train(FusionSizeModel(None), overhead, each, 200)) * each <= 0.4


def test_a_size_is_not_traced_before_it_would_have_saved_much_of_its_tracing_time() -> None:
    overhead, each, making = 1e-3, 2e-3, 0.1
    sizes = train(FusionSizeModel(None), overhead, each, 100, making)
    first = next(number for number, size in enumerate(sizes) if size > 1)
    assert 4 * first * (overhead + each) >= sizes[first] * making / 2
    assert max(train(FusionSizeModel(None), overhead, each, 5000, making)) > max(sizes)


def test_there_are_few_sizes() -> None:
    assert set(train(FusionSizeModel(None), 1e-3, 1e-6, 2000)) <= {1, 4, 16, 64}


def test_a_size_that_was_made_is_used_for_whatever_is_there() -> None:
    model = FusionSizeModel(None)
    train(model, 1e-3, 1e-6, 1000)
    assert model.steps("step", 63) == 16
    assert model.steps("step", 3) == 1
    assert model.steps("step", 1) == 1


def test_a_pace_follows_steps_that_become_longer_and_shorter_again() -> None:
    model = FusionSizeModel(None)
    train(model, 1e-3, 1e-4, 500)
    assert train(model, 1e-3, 0.1, 500)[-40:].count(1) > 30
    assert train(model, 1e-3, 1e-4, 2000)[-20:].count(1) < 5


def test_a_function_that_failed_with_others_runs_alone_from_then_on() -> None:
    for model in (FusionSizeModel(None), FusionSizeModel(8)):
        train(model, 1e-3, 1e-4, 100)
        model.record_error("step")
        assert model.steps("step", ENOUGH) == 1
        assert FusionSizeModel(8).steps("other", ENOUGH) == 8


@pytest.mark.parametrize(("most", "available", "steps"), [(1, 9, 1), (6, 9, 6), (6, 6, 6), (6, 5, 4), (6, 1, 1)])
def test_a_fixed_number_needs_no_experience(most: int, available: int, steps: int) -> None:
    assert FusionSizeModel(most).steps("step", available) == steps


def test_what_is_known_of_functions_that_are_not_run_any_more_is_forgotten() -> None:
    model = FusionSizeModel(4)
    model.record_error("first")
    for number in range(1000):
        model.record(number, 1, 1e-3)
    assert model.steps("first", ENOUGH) == 4
