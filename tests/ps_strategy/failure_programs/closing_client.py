"""A client that closes its strategy, or does not, in several ways. The servers are started by the test.

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
from unittest import mock

import keras
import psutil
import pytest
import tensorflow as tf
from keras.src.backend.tensorflow import trainer
from tensorflow.python.eager import context
from tensorflow.python.framework import ops

import coordinator
from coordinator.ps_strategy import parameter_server_strategy, strategy_parts
from coordinator.ps_strategy.keras.internals.patches import Trainer, numpy_operations
from coordinator.ps_strategy.membership import membership
from coordinator.workers import scheduler
from tests.deadline import wait_until
from tests.ps_strategy.every_worker import unhealthy
from tests.ps_strategy.failure_programs.trainer import connect
from tests.ps_strategy.gate import Gate

TIMEOUT = 120.0
# The private function by which a program resets TensorFlow.
RESET = "_reset_context"


def threads() -> list[str]:
    """Returns the names of the library's threads. A thread may end a moment after its call has returned a result."""
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("coordinator")]


def listening() -> list[int]:
    """Returns the ports on which this process listens."""
    sockets = psutil.Process().net_connections(kind="tcp")
    return [connection.laddr.port for connection in sockets if connection.status == psutil.CONN_LISTEN]


def patches() -> list[dict[str, object]]:
    """Returns the attributes of Keras' and TensorFlow's classes, modules and objects that a strategy patches."""
    owners = (keras.Model, Trainer, trainer, numpy_operations, ops, context.context())
    return [{name: value for name, value in vars(owner).items() if callable(value)} for owner in owners]


@contextlib.contextmanager
def nothing_left_behind() -> Iterator[None]:
    patched, environment = patches(), dict(os.environ)
    yield
    assert patches() == patched
    assert dict(os.environ) == environment
    wait_until(lambda: not threads())
    assert psutil.Process().children(recursive=True) == []
    assert len(listening()) == 1, "only the port on which workers call back stays open"


def leave_by(error: BaseException, spec: str, running: list[coordinator.Future]) -> None:
    """Raises `error` in a strategy's block, while a function runs that does not end."""
    with connect(spec) as strategy:
        running += Gate(strategy).occupy()
        raise error


def release_manager(spec: str) -> None:
    """Closing a strategy restores the original `save` of its checkpoint manager."""
    with nothing_left_behind(), tempfile.TemporaryDirectory() as folder:
        manager = tf.train.CheckpointManager(tf.train.Checkpoint(), folder, max_to_keep=1)
        with connect(spec) as strategy:
            strategy.restore_from(manager)
            with pytest.raises(ValueError, match="enable_async"):
                manager.save(options=tf.train.CheckpointOptions(enable_async=True))
        assert manager.save.__func__ is tf.train.CheckpointManager.save


def undo_patches(spec: str) -> None:
    """Closing a strategy undoes its patches; its models can no longer be trained."""
    os.environ["GRPC_FAIL_FAST"] = "use_caller"
    stock, environment = patches(), dict(os.environ)
    for _ in range(2):
        with nothing_left_behind(), connect(spec) as strategy:
            assert all(now != before for now, before in zip(patches(), stock, strict=True))
            assert dict(os.environ) != environment
            with strategy.scope():
                model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
                model.compile("sgd", "mse")
            model.fit(tf.ones([2, 1]), tf.ones([2, 1]), verbose=0)
        for call in (model.fit, model.evaluate, model.predict):
            with pytest.raises(coordinator.StrategyClosedError):
                call(tf.ones([2, 1]), verbose=0)
    tf.train.Checkpoint(step=tf.Variable(1)).write(os.path.join(tempfile.mkdtemp(), "of_this_process"))


def forget(spec: str) -> None:
    """Deletes a strategy; garbage collection closes it."""
    with nothing_left_behind():
        forgotten = connect(spec)
        forgotten.schedule(tf.function(lambda: tf.constant(1))).result(TIMEOUT)
        with forgotten.scope():
            model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
            model.compile("adam", "mse")
        model.fit(tf.ones([2, 1]), tf.ones([2, 1]), verbose=0)
        del forgotten, model
        gc.collect()
        wait_until(lambda: not threads())


def close_while_generators_wait(spec: str) -> None:
    """Closes in bounded time although every worker waits for a generator of this process that yields no element."""
    waiting, closed = threading.Semaphore(0), threading.Event()

    def elements() -> Iterator[float]:
        yield 1.0
        waiting.release()
        closed.wait()

    strategy = connect(spec, close_timeout=0.5, heartbeat_timeout=1.0)
    dataset = tf.data.Dataset.from_generator(elements, output_signature=tf.TensorSpec([])).prefetch(2)
    iterator = iter(strategy.experimental_distribute_dataset(dataset))
    step = tf.function(lambda iterator: next(iterator))  # noqa: PLW0108 - a builtin has no signature
    for _ in range(2 * len(strategy.cluster.workers)):
        strategy.schedule(step, args=(iterator,))
    assert waiting.acquire(timeout=TIMEOUT)
    began = time.monotonic()
    strategy.close()
    assert time.monotonic() - began < TIMEOUT / 4
    # Each generator that waits occupies one of TensorFlow's threads, of which there may be only two.
    closed.set()


def close_in_every_way_then_end(spec: str) -> None:
    """Closes several strategies, each in another way; the last one runs functions when the program ends."""
    with nothing_left_behind(), connect(spec) as strategy:
        future = strategy.schedule(tf.function(lambda: tf.constant(1)))
        assert sum("coordinator-worker" in name for name in threads()) == len(strategy.cluster.workers)
    assert future.result(timeout=0) == 1, "leaving the block joins"
    strategy.close()
    with pytest.raises(coordinator.StrategyClosedError):
        strategy.schedule(tf.function(lambda: tf.constant(1)))

    running: list[coordinator.Future] = []
    with nothing_left_behind(), pytest.raises(ValueError, match="of the user"):
        leave_by(ValueError("of the user"), spec, running)
    assert isinstance(running[0].exception(timeout=0), coordinator.ClosureCancelledError)

    with nothing_left_behind(), pytest.raises(KeyboardInterrupt):
        interrupt_join(spec)

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
    undo_patches(spec)
    forget(spec)
    close_while_generators_wait(spec)
    end_while_functions_run(spec)


def end_while_functions_run(spec: str) -> None:
    """Ends the program without closing the strategy."""
    strategy = connect(spec)
    Gate(strategy).occupy(2)
    one = tf.function(lambda: tf.constant(1))
    for _ in range(1_000):
        strategy.schedule(one)


def reset_tensorflow(spec: str) -> None:
    """Resets TensorFlow under an open strategy, as test suites do between two tests, and ends so."""
    # What a program calls that had imported it before the strategy was made.
    unwatched = getattr(context, RESET)
    for reset in (None, None, unwatched, unwatched):
        reset_under_a_strategy(spec, reset)
    strategy = connect(spec)
    unwatched()
    assert strategy.cluster.workers


def reset_under_a_strategy(spec: str, unwatched: Callable[[], None] | None) -> None:
    strategy = connect(spec)
    with strategy.scope():
        variables = [tf.Variable(1.0)]
    step = tf.function(lambda: variables[0].assign_add(1.0))
    assert strategy.schedule(step).result(TIMEOUT) == 2
    Gate(strategy).occupy(1)
    (unwatched or getattr(context, RESET))()
    if unwatched is None:
        with pytest.raises(tf.errors.FailedPreconditionError, match="which was deleted with its strategy"):
            variables[0].numpy()
    for function in (step, tf.function(lambda: tf.constant(1))):
        with pytest.raises(coordinator.StrategyClosedError):
            strategy.schedule(function).result(TIMEOUT)
    variables.clear()
    gc.collect()
    strategy.close()
    wait_until(lambda: not threads())
    assert psutil.Process().children(recursive=True) == []


def end_while_a_worker_is_dead(spec: str) -> None:
    """Ends the program without closing the strategy, with one worker dead and functions waiting for the others."""
    strategy = connect(spec)
    assert len(unhealthy(strategy)) == 1
    Gate(strategy).occupy(2)
    strategy.schedule(tf.function(lambda: tf.constant(1)))


def interrupt_join(spec: str) -> None:
    """Presses Ctrl-C while the main thread is in `join`, waiting for functions that never end."""
    with connect(spec) as strategy:
        Gate(strategy).occupy(2)
        interrupter = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
        interrupter.start()
        strategy.join()


def fail_while_it_is_made(spec: str) -> None:
    """Creates strategies, in each of which another part cannot be created."""
    parts = [
        (membership, "ClientLease"),
        (membership, "Heartbeat"),
        (membership, "ServerLinks"),
        (membership, "TaskProbe"),
        (strategy_parts, "keras_extended"),
        (strategy_parts, "Scheduler"),
        (scheduler, "Cluster"),
        (scheduler, "Listeners"),
        (scheduler.Cluster, "start"),
        (strategy_parts, "FunctionTracer"),
        (parameter_server_strategy, "ParameterServerExtended"),
        (parameter_server_strategy, "DatasetDistribution"),
    ]
    # The process keeps the port on which workers call back from its first strategy on.
    connect(spec).close()
    for owner, name in parts:
        failing = mock.patch.object(owner, name, side_effect=MemoryError(name))
        with nothing_left_behind():
            with failing, pytest.raises(MemoryError, match=name):
                connect(spec)
            # A thread that has run no call yet is not waited for.
            wait_until(lambda: not threads(), TIMEOUT)
    with connect(spec) as strategy:
        assert strategy.schedule(tf.function(lambda: tf.constant(1))).result(TIMEOUT) == 1


ENDINGS: dict[str, Callable[[str], None]] = {
    function.__name__: function
    for function in (
        close_in_every_way_then_end,
        fail_while_it_is_made,
        reset_tensorflow,
        end_while_a_worker_is_dead,
        interrupt_join,
    )
}


if __name__ == "__main__":
    try:
        ENDINGS[sys.argv[2]](sys.argv[1])
    finally:
        print(time.time(), flush=True)  # noqa: T201 - when the program itself was over
