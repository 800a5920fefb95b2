"""Fixtures of all tests: one real cluster for the whole run, programs in separate processes, a check for leftovers.

Tests run in the order of what they need: those of a process that was never connected, those without a cluster, those
that start their own cluster, which may take long, and those of the shared cluster.
"""

import contextlib
import dataclasses
import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests import ROOT
from tests.deadline import wait_until
from tests.leftovers import Leftovers
from tests.program_runner import PreloadedInterpreter, ProgramRunner

if TYPE_CHECKING:
    from coordinator import ClusterStatistics, ParameterServerStrategy
    from coordinator.ps_strategy.tensorflow_internals.handles import TracedFunctions
    from coordinator.testing import LocalCluster

# TensorFlow reads these when it is loaded. Servers inherit them.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ["CUDA_VISIBLE_DEVICES"] = ""
os.environ.pop("TF_CONFIG", None)
# Every process that a test starts imports this checkout, even if another copy is installed.
os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])

# How long threads and processes may take to end after a test, in seconds: far more than on an idle machine.
ENDING_TIMEOUT = 15.0
# How long the shared strategy may need to finish what a test scheduled, in seconds.
SETTLING_TIMEOUT = 60.0


def pytest_collection() -> None:
    """Collects no garbage while the tests are imported: there is little, and looking for it takes a second."""
    gc.disable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks the tests of the shared cluster, and sorts the tests by what they need."""
    for item in items:
        if "shared_cluster" in getattr(item, "fixturenames", ()):
            item.add_marker("cluster")
    items.sort(key=_cost)


def _cost(item: pytest.Item) -> int:
    if item.get_closest_marker("unconnected") is not None:
        return -1
    is_shared = "shared_cluster" in getattr(item, "fixturenames", ())
    return 2 if is_shared else int(item.get_closest_marker("cluster") is not None)


def pytest_collection_finish() -> None:
    """Excludes what importing the tests has created, TensorFlow's modules above all, from garbage collections."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True)
def nothing_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fails a test that leaves a thread of the library or a process that did not exist before it."""
    leftovers = Leftovers()
    yield
    left = leftovers.wait_gone(ENDING_TIMEOUT)
    assert not left, f"{request.node.name} left behind {', '.join(left)}."


@pytest.fixture(scope="session")
def interpreter() -> Iterator[PreloadedInterpreter]:
    """The process that programs are forked from."""
    with contextlib.closing(PreloadedInterpreter()) as interpreter:
        yield interpreter


@pytest.fixture
def run_program(interpreter: PreloadedInterpreter, tmp_path: Path) -> ProgramRunner:
    """Runs a program in a separate process: `run_program(source, *arguments, timeout=120, exit_code=0)`."""
    folder = tmp_path / "programs"
    folder.mkdir()
    return ProgramRunner(interpreter, folder)


@pytest.fixture(scope="session")
def shared_cluster() -> "Iterator[LocalCluster]":
    """Two workers and two parameter servers for the whole run. A test that kills one of them restarts it."""
    from coordinator.testing import LocalCluster

    with LocalCluster(workers=2, ps=2) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def strategy(shared_cluster: "LocalCluster") -> "Iterator[ParameterServerStrategy]":
    """The strategy on the shared cluster. A process connects to one cluster only, so all its tests use this one."""
    from coordinator import Options, ParameterServerStrategy
    from tests.ps_strategy.sharded.partitioners import partitioner_of_test

    # So little that small variables are saved in blocks.
    options = Options(checkpoint_memory=2**16)
    # Closed, not joined: functions of a failed test may never end.
    with contextlib.closing(ParameterServerStrategy(shared_cluster.resolver, partitioner_of_test, options)) as strategy:
        yield strategy


@pytest.fixture(autouse=True)
def settled_strategy(request: pytest.FixtureRequest) -> Iterator[None]:
    """Joins the shared strategy after each test, so that nothing scheduled and no error is left for the next one."""
    if "strategy" not in request.fixturenames:
        yield
        return
    strategy = request.getfixturevalue("strategy")
    yield
    try:
        strategy.join(timeout=SETTLING_TIMEOUT)
    except TimeoutError as error:
        from tests.ps_strategy.every_worker import scheduler_of

        # Functions of this test must not make the next tests fail.
        scheduler_of(strategy).queue.fail_all(error, if_idle=True)
        strategy.join(timeout=SETTLING_TIMEOUT)
    # A worker that the test restarted may not be connected yet.
    wait_until(lambda: not any(worker.away_seconds for worker in strategy.cluster.workers), SETTLING_TIMEOUT)


class Counted:
    """What the shared cluster has counted since the beginning of the test."""

    def __init__(self, strategy: "ParameterServerStrategy") -> None:
        from tests.ps_strategy.every_worker import finish_own_work

        finish_own_work(strategy)
        strategy.settled(SETTLING_TIMEOUT)
        self._strategy, self._before = strategy, strategy.cluster.statistics()

    def __call__(self) -> "ClusterStatistics":
        """Returns the differences of all counts, once all that has ended is counted."""
        self._strategy.settled(SETTLING_TIMEOUT)
        after, before = self._strategy.cluster.statistics(), self._before
        workers = tuple(map(_difference, after.workers, before.workers))
        servers = tuple(map(_difference, after.parameter_servers, before.parameter_servers))
        return _difference(dataclasses.replace(after, workers=workers, parameter_servers=servers), before)


def _difference(after: Any, before: Any) -> Any:
    now = ("index", "device", "state", "waiting", "running", "workers", "parameter_servers")
    names = [field.name for field in dataclasses.fields(after) if field.name not in now]
    return dataclasses.replace(after, **{name: getattr(after, name) - getattr(before, name) for name in names})


@pytest.fixture
def counted(strategy: "ParameterServerStrategy") -> Counted:
    """Returns the statistics of the shared cluster as differences: other tests have used it before."""
    return Counted(strategy)


@pytest.fixture(autouse=True)
def no_seed() -> Iterator[None]:
    """Forgets the seed of all random numbers that a test has set, by which others would draw the same ones."""
    yield
    tf = sys.modules.get("tensorflow")
    # Setting it also empties the caches of kernels, which the next tests would fill again.
    if tf is not None and tf.compat.v1.get_seed(None) != (None, None):
        tf.random.set_seed(None)


@pytest.fixture
def recorded_functions() -> "Iterator[TracedFunctions]":
    """The functions that are traced in this test, in which `replace_handles` replaces handles."""
    from coordinator.ps_strategy.tensorflow_internals.handles import TracedFunctions

    with TracedFunctions().recorded() as functions:
        yield functions


@pytest.fixture
def frequent_thread_switches() -> Iterator[None]:
    """Makes Python switch between threads as often as possible."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)
