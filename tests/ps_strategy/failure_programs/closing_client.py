"""A client that closes its strategy, or does not, in several ways. The servers are others'.

Its arguments are the cluster specification as JSON, and the name of one of the functions below `ENDINGS`.
"""

import contextlib
import gc
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator

import psutil
import pytest
import tensorflow as tf

import coordinator
from tests.deadline import wait_until
from tests.ps_strategy.failure_programs.trainer import connect
from tests.ps_strategy.gate import Gate

TIMEOUT = 120.0


def threads() -> list[str]:
    """The names of the library's threads."""
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("coordinator")]


def listening() -> list[int]:
    """The ports on which this process listens."""
    connections = psutil.Process().net_connections(kind="tcp")
    return [connection.laddr.port for connection in connections if connection.status == psutil.CONN_LISTEN]


@contextlib.contextmanager
def nothing_left_behind() -> Iterator[None]:
    yield
    assert threads() == []
    assert psutil.Process().children(recursive=True) == []
    assert len(listening()) == 1, "the port on which workers call back stays, and no other"


def leave_by(error: BaseException, spec: str, running: list[coordinator.Future]) -> None:
    """Raises `error` in a strategy's block, while a function runs that does not end."""
    with connect(spec) as strategy:
        running += Gate(strategy).occupy()
        raise error


def release_manager(spec: str) -> None:
    """A strategy that is closed gives the manager that it restores from its own `save` back."""
    with nothing_left_behind(), tempfile.TemporaryDirectory() as folder:
        manager = tf.train.CheckpointManager(tf.train.Checkpoint(), folder, max_to_keep=1)
        with connect(spec) as strategy:
            strategy.restore_from(manager)
            with pytest.raises(ValueError, match="enable_async"):
                manager.save(options=tf.train.CheckpointOptions(enable_async=True))
        assert manager.save.__func__ is tf.train.CheckpointManager.save


def close_in_every_way(spec: str) -> None:
    """One strategy after another, each closed in its own way."""
    with nothing_left_behind(), connect(spec) as strategy:
        future = strategy.schedule(tf.function(lambda: tf.constant(1)))
        assert sum("coordinator-worker" in name for name in threads()) == len(strategy.cluster.workers)
    assert future.result(timeout=0) == 1, "leaving the block joins"
    strategy.close()
    with pytest.raises(coordinator.StrategyClosedError):
        strategy.schedule(tf.function(lambda: tf.constant(1)))

    for error in (ValueError("of the user"), KeyboardInterrupt()):
        running: list[coordinator.Future] = []
        with nothing_left_behind(), pytest.raises(type(error)):
            leave_by(error, spec, running)
        assert isinstance(running[0].exception(timeout=0), coordinator.ClosureCancelledError)

    with nothing_left_behind(), pytest.raises(tf.errors.InvalidArgumentError), connect(spec) as strategy:
        strategy.schedule(tf.function(lambda: tf.debugging.assert_equal(1, tf.identity(2))))

    with nothing_left_behind():
        first = connect(spec)
        with pytest.raises(RuntimeError, match="close the first one"):
            connect(spec)
        assert first.schedule(tf.function(lambda: tf.constant(1))).result(TIMEOUT) == 1
        first.close()
        first.close()

    release_manager(spec)

    with nothing_left_behind():
        forgotten = connect(spec)
        forgotten.schedule(tf.function(lambda: tf.constant(1))).result(TIMEOUT)
        del forgotten
        gc.collect()
        wait_until(lambda: not threads())


def end_while_functions_run(spec: str) -> None:
    """No close: the program just ends."""
    strategy = connect(spec)
    Gate(strategy).occupy(2)
    one = tf.function(lambda: tf.constant(1))
    for _ in range(1_000):
        strategy.schedule(one)


def end_while_a_worker_is_dead(spec: str) -> None:
    """No close, with one worker gone and functions waiting for the others."""
    strategy = connect(spec)
    assert len(strategy.cluster.unhealthy()) == 1
    Gate(strategy).occupy(2)
    strategy.schedule(tf.function(lambda: tf.constant(1)))


def interrupt_join(spec: str) -> None:
    """Ctrl-C while the main thread is in `join`, for functions that never end."""
    with connect(spec) as strategy:
        Gate(strategy).occupy(2)
        interrupter = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))
        interrupter.start()
        strategy.join()


ENDINGS: dict[str, Callable[[str], None]] = {
    function.__name__: function
    for function in (close_in_every_way, end_while_functions_run, end_while_a_worker_is_dead, interrupt_join)
}


if __name__ == "__main__":
    try:
        ENDINGS[sys.argv[2]](sys.argv[1])
    finally:
        print(time.time(), flush=True)  # noqa: T201 - when the program itself was over
