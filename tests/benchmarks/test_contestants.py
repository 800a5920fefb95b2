"""A contestant returns its figures or its error, and one that hangs is killed."""

import pytest

from benchmarks.contestants.contestant_process import ContestantProcess
from benchmarks.contestants.digits_steps import minibatches, new_model
from benchmarks.contestants.program import SIDES, WORKLOADS, answer
from benchmarks.contestants.rate_meter import RateMeter


class FakeWorkload:
    """Runs every function but one."""

    def run(self, work, seconds):
        if work == "broken":
            raise ValueError("no such work\nand more")
        return {"rate": seconds}


def test_an_error_is_returned_as_an_answer():
    assert answer(FakeWorkload(), {"work": "whole", "seconds": 2.0}) == {"figures": {"rate": 2.0}}
    assert answer(FakeWorkload(), {"work": "broken", "seconds": 2.0}) == {"error": "ValueError: no such work"}


def test_the_number_of_calls_of_a_round_follows_the_last_rate():
    counts = []
    meter = RateMeter(counts.append)
    for seconds in (0.001, 1e-4):
        before = meter.rate(0.001)
        meter.rate(seconds)
        assert counts[-1] == min(max(round(before * seconds), 1), 100_000)
    assert counts[:2] == [1, 50]


def test_a_round_is_never_of_too_few_calls():
    counts = []
    meter = RateMeter(counts.append, least_rate=1e12)
    meter.rate(1e-9)
    assert counts[-1] == 1000


@pytest.fixture
def contestant(tmp_path):
    with ContestantProcess("dispatch", "single", {}, tmp_path / "log") as process:
        process.wait_connected()
        yield process


@pytest.mark.long
@pytest.mark.cluster
def test_a_contestant_runs_rounds_until_it_has_ended(contestant):
    for work in ("empty", "scalar", "assign_add"):
        assert contestant.run(work, 0.01)["figures"]["rate"] > 0
    assert "KeyError" in contestant.run("dance", 0.01)["error"]
    contestant.process.kill()
    assert [set(contestant.run("empty", 0.01)) for _ in range(2)] == [{"error"}] * 2
    contestant.close()


@pytest.mark.cluster
def test_a_contestant_that_does_not_answer_in_time_is_killed(tmp_path):
    with (
        ContestantProcess("dispatch", "single", {}, tmp_path / "log", patience=0.01) as process,
        pytest.raises(RuntimeError, match="hangs"),
    ):
        process.wait_connected()


def test_every_workload_and_side_has_a_name():
    kinds = {
        "dispatch",
        "first",
        "latency",
        "recommender",
        "recurrent",
        "dense",
        "layers",
        "embeddings",
        "sharded",
        "tables",
        "data",
        "pauses",
    }
    assert set(WORKLOADS) == kinds
    plain = {"ours", "runs", "loop", "other loop", "devices", "alone", "dense", "peer", "bare", "hand", "single"}
    assert set(SIDES) == plain | {"sharded", "peer sharded"}


def test_the_network_accepts_the_digits():
    images, labels = next(iter(minibatches(32)))
    assert images.shape == (32, 8, 8, 1)
    assert 0.0 <= float(images.numpy().min()) <= float(images.numpy().max()) == 1.0
    assert new_model()(images).shape == (labels.shape[0], 10)
