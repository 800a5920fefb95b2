from pathlib import Path

import numpy as np
import pytest

from coordinator.simulation.rules import Asynchronous
from coordinator.simulation.simulated_cluster import simulate
from coordinator.testbed.image_data import ImageData
from coordinator.testbed.step_times import Run, StepTimes
from coordinator.testbed.training import RecordFile

IMAGES = np.arange(12, dtype=np.uint8).repeat(2 * 3).reshape(12, 2, 3, 1)
DATA = ImageData(IMAGES, np.arange(12, dtype=np.uint8), 11, IMAGES, IMAGES[:, 0, 0, 0])


def labels_of(records: RecordFile, worker: int, *, count: int, seed: int = 0) -> list[list[int]]:
    found = []
    for images, labels in records.minibatches(3, worker, 2, seed).take(count):
        assert images.shape == (3, 2, 3, 1)
        np.testing.assert_allclose(images[:, 1, 2, 0] * 11, labels)
        found.append(labels.numpy().tolist())
    return found


def test_workers_share_the_images_and_repeat_their_parts(tmp_path: Path) -> None:
    records = RecordFile(DATA, tmp_path / "images")
    for worker in (0, 1):
        first, second, third, fourth = labels_of(records, worker, count=4)
        assert sorted(first + second) == sorted(third + fourth) == list(range(worker, 12, 2))


def recorded(*, steps: int, pull: float, compute: float, push: float, dispatch: float, begin: float = 0.0):
    """Returns the recorded times of a worker whose steps are all equal."""
    requested = begin + np.arange(steps) * (pull + compute + push + dispatch)
    return np.stack(
        [requested, requested + pull, requested + pull + compute, requested + pull + compute + push], axis=1
    )


def run_of(*recorded, waited: float = 0.0) -> Run:
    return Run(seconds=1.0, updates=1, histogram=np.array([1]), waited=waited, recorded=recorded)


def test_the_parts_of_a_step_lie_between_its_recorded_times() -> None:
    quick = recorded(steps=10, pull=0.01, compute=0.1, push=0.02, dispatch=0.03)
    slow = recorded(steps=5, pull=0.01, compute=0.3, push=0.02, dispatch=0.03)
    times = StepTimes.of([run_of(quick, slow), run_of(quick, slow)])
    assert times.computed[0] == pytest.approx([0.1] * 20)
    assert times.computed[1] == pytest.approx([0.3] * 10)
    # The time between the last step of a run and the first one of the next is ignored.
    assert times.dispatch == pytest.approx([0.03] * (2 * 9 + 2 * 4))
    assert (times.pull, times.push) == pytest.approx((0.01, 0.02))


@pytest.mark.parametrize(("pull", "push"), [(0.01, 0.02), (0.02, 0.01)])
def test_a_simulated_step_takes_as_long_as_the_real_one(pull: float, push: float) -> None:
    steps = recorded(steps=10, pull=pull, compute=0.1, push=push, dispatch=0.03)
    result = simulate(StepTimes.of([run_of(steps)]).setting(Asynchronous()))
    assert result.updates_per_second == pytest.approx(1 / 0.16, rel=1e-3)
    assert result.computed[0] / result.gradients == pytest.approx(0.1 + max(pull - push, 0))
