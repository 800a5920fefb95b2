"""Tests of the model that computes how many closures to run in one call from measured times."""

import pytest

from coordinator.workers.fusion_size import FusionSizeModel

ENOUGH = 10_000


def train(model: FusionSizeModel, overhead: float, each: float, calls: int, tracing: float = 0.0) -> list[int]:
    """Runs calls that take `overhead + steps * each` seconds, the first of each size `steps * tracing` more."""
    sizes: list[int] = []
    for _ in range(calls):
        steps = model.steps("step", ENOUGH)
        model.record("step", steps, overhead + steps * (each if steps in sizes else each + tracing))
        sizes.append(steps)
    return sizes


def test_short_steps_are_fused_until_the_call_takes_a_fortieth_of_the_time() -> None:
    assert FusionSizeModel(None).steps("step", ENOUGH) == 1
    # Up to a limit, in few sizes; long steps run alone, and no call takes more than some tenths of a second.
    assert set(train(FusionSizeModel(None), 1e-3, 1e-6, 2000)) == {1, 4, 16, 64, 256}
    assert set(train(FusionSizeModel(None), 1e-3, 0.1, 100)) == {1}
    assert 0.02 + max(train(FusionSizeModel(None), 0.02, 0.02, 200)) * 0.02 <= 0.4
    overhead, each = 1e-3, 1e-3
    size = max(train(FusionSizeModel(None), overhead, each, 200))
    assert overhead / (overhead + size * each) <= 1 / 40
    assert overhead / (overhead + size / 2 * each) > 1 / 40


def test_a_size_is_not_traced_before_it_would_have_saved_much_of_its_tracing_time() -> None:
    overhead, each, tracing = 1e-3, 2e-3, 0.1
    sizes = train(FusionSizeModel(None), overhead, each, 100, tracing)
    first = next(number for number, size in enumerate(sizes) if size > 1)
    assert 4 * first * (overhead + each) >= sizes[first] * tracing / 2
    assert max(train(FusionSizeModel(None), overhead, each, 5000, tracing)) > max(sizes)


def test_a_traced_size_is_used_whenever_enough_closures_wait() -> None:
    model = FusionSizeModel(None)
    train(model, 1e-3, 1e-6, 1000)
    assert model.steps("step", 63) == 16
    assert model.steps("step", 3) == 1
    assert model.steps("step", 1) == 1


def test_the_size_adapts_to_longer_and_shorter_steps() -> None:
    model = FusionSizeModel(None)
    train(model, 1e-3, 1e-4, 500)
    assert train(model, 1e-3, 0.1, 500)[-40:].count(1) > 30
    assert train(model, 1e-3, 1e-4, 2000)[-20:].count(1) < 5


def test_a_function_that_failed_in_a_fused_call_runs_alone_from_then_on() -> None:
    for model in (FusionSizeModel(None), FusionSizeModel(8)):
        train(model, 1e-3, 1e-4, 100)
        model.record_error("step")
        assert model.steps("step", ENOUGH) == 1
        assert FusionSizeModel(8).steps("other", ENOUGH) == 8


@pytest.mark.parametrize(("most", "available", "steps"), [(1, 9, 1), (6, 9, 6), (6, 6, 6), (6, 5, 4), (6, 1, 1)])
def test_a_fixed_size_needs_no_measurements(most: int, available: int, steps: int) -> None:
    assert FusionSizeModel(most).steps("step", available) == steps


def test_a_size_is_run_only_when_it_is_ready() -> None:
    model = FusionSizeModel(None)
    for _ in range(100):
        assert model.steps("step", ENOUGH, {}) == 1
        model.record("step", 1, 1e-3)
    assert model.wanted("step", ENOUGH) == 4
    assert model.steps("step", ENOUGH, {4: 0.1}) == 4
    # Of what is ready the largest that is not larger than wanted.
    assert model.steps("step", ENOUGH, {2: 0.1, 3: 0.1, 16: 0.1}) == 3
    assert model.steps("step", 2, {4: 0.1}) == 1


def test_a_larger_size_is_wanted_once_it_would_have_saved_what_the_last_one_cost() -> None:
    quick, slow = FusionSizeModel(None), FusionSizeModel(None)
    for model, seconds in ((quick, 0.001), (slow, 1000.0)):
        train(model, 1e-3, 1e-6, 2)
        for _ in range(200):
            model.record("step", model.steps("step", ENOUGH, {4: seconds}), 1e-3)
            model.note_ready("step", {4: seconds})
    assert quick.wanted("step", ENOUGH) == 16
    assert slow.wanted("step", ENOUGH) == 4


def test_a_restarted_worker_wants_what_is_known_after_its_first_call() -> None:
    model = FusionSizeModel(None)
    train(model, 1e-3, 1e-6, 1000)
    model.restart()
    assert train(model, 1e-3, 1e-6, 2, tracing=1.0) == [1, 256]
    # The first call in a process of the worker, which takes longer, is not counted.
    assert model.steps("step", ENOUGH) == 256


def test_a_worker_goes_beyond_its_share_for_as_long_as_another_call_takes() -> None:
    model = FusionSizeModel(None)
    assert model.beyond_share("step") == 0
    train(model, 1e-2, 1e-3, 500)
    assert 8 <= model.beyond_share("step") <= 11
    train(model, 1e-3, 0.1, 500)
    assert model.beyond_share("step") == 0
    assert FusionSizeModel(8).beyond_share("step") == 0


def test_a_larger_traced_size_is_used_if_its_call_is_short_enough() -> None:
    model = FusionSizeModel(None)
    each = 0.05
    assert max(train(model, 0.02, each, 200)) == 4
    # Two steps would be enough now, but that size is not traced.
    assert train(model, 0.0025, each, 400)[-30:].count(4) >= 29
    # Four steps would take too long.
    assert set(train(model, 0.004, 0.12, 400)[-30:]) == {1}
