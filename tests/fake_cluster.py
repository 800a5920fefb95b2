"""A cluster of the core on a fake runtime, closed when the test ends."""

import contextlib
from collections.abc import Iterator

from coordinator.cluster import Cluster
from coordinator.options import Options
from coordinator.testing.fake_runtime import FakeRuntime
from tests.deadline import LIMIT

OPTIONS = Options(
    heartbeat_interval=0.05, reconnect_interval=0.001, transient_retries=3, max_attempts=3, close_timeout=LIMIT
)


@contextlib.contextmanager
def running_cluster(runtime: FakeRuntime, options: Options = OPTIONS) -> Iterator[Cluster]:
    """Runs on `runtime` until the block ends."""
    with contextlib.closing(Cluster(runtime, options)) as cluster:
        yield cluster


def index_of(worker: int) -> int:
    """Work that returns the index of the worker that runs it."""
    return worker
