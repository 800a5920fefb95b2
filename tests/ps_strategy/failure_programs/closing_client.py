"""A client that closes its strategy, or does not, in several ways. The servers are started by the test.

Its arguments are the cluster specification as JSON, and the name of one of the functions in `ENDINGS`.
"""

import contextlib
import gc
import itertools
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
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
from tests.ps_strategy.failure_programs.trainer import connect
from tests.ps_strategy.gate import Gate

TIMEOUT = 120.0
# The private function by which a program resets TensorFlow.
RESET = "_reset_context"
SIZES = itertools.count(50)


@tf.function
def one() -> tf.Tensor:
    """Returns 1 if the index of the worker is known. TensorFlow traces it under the first strategy alone."""
    return tf.where(coordinator.get_current_worker_index() < 0, 0, 1)


def threads() -> list[str]:
    """Returns the names of the library's threads. A thread may end a moment after its call has returned a result."""
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("coordinator")]


def patches() -> list[dict[str, object]]:
    """Returns the attributes of Keras' and TensorFlow's classes, modules and objects that a strategy patches."""
    owners = (keras.Model, Trainer, trainer, numpy_operations, ops, context.context())
    return [{name: value for name, value in vars(owner).items() if callable(value)} for owner in owners]


def are_operations_wrapped() -> bool:
    """Returns whether TensorFlow registers a function for an operation with a new number of inputs."""
    size = next(SIZES)
    tf.add_n([tf.constant(1)] * size)
    return any(f"AddN_N_{size}" in str(name) for name in context.context().list_function_names())


@contextlib.contextmanager
def nothing_left_behind() -> Iterator[None]:
    patched, environment = patches(), dict(os.environ)
    yield
    # A thread that has run no call yet is not waited for.
    wait_until(lambda: not threads(), TIMEOUT)
    assert patches() == patched
    assert are_operations_wrapped()
    assert dict(os.environ) == environment
    assert psutil.Process().children(recursive=True) == []
    connections = psutil.Process().net_connections(kind="tcp")
    listening = [each.laddr.port for each in connections if each.status == psutil.CONN_LISTEN]
    assert len(listening) == 1, "only the port on which workers call back stays open"


def trained_model(strategy: coordinator.ParameterServerStrategy) -> keras.Model:
    with strategy.scope():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        model.compile("adam", "mse")
    model.fit(tf.ones([2, 1]), tf.ones([2, 1]), verbose=0)
    return model


def leave_block(spec: str) -> None:
    """Leaves a strategy's block, which joins; its patches are undone, and its models can no longer be trained."""
    stock, environment = patches(), dict(os.environ)
    with tempfile.TemporaryDirectory() as folder:
        manager = tf.train.CheckpointManager(tf.train.Checkpoint(), folder, max_to_keep=1)
        with connect(spec) as strategy:
            assert all(now != before for now, before in zip(patches(), stock, strict=True))
            assert dict(os.environ) != environment
            assert not are_operations_wrapped()
            assert sum("coordinator-worker" in name for name in threads()) == len(strategy.cluster.workers)
            with pytest.raises(RuntimeError, match="close the first one"):
                connect(spec)
            model = trained_model(strategy)
            strategy.restore_from(manager)
            assert "save" in vars(manager)
            future = strategy.schedule(one)
        assert "save" not in vars(manager)
        tf.train.Checkpoint(step=tf.Variable(1)).write(os.path.join(folder, "of_this_process"))
    assert future.result(timeout=0) == 1
    strategy.close()
    with pytest.raises(coordinator.StrategyClosedError):
        strategy.schedule(one)
    for call in (model.fit, model.evaluate, model.predict):
        with pytest.raises(coordinator.StrategyClosedError):
            call(tf.ones([2, 1]), verbose=0)


def leave_by(spec: str, running: list[coordinator.Future], leave: Callable[[], None]) -> None:
    """Leaves a strategy's block in a way while functions run that do not end."""
    with connect(spec) as strategy:
        running += Gate(strategy).occupy(2)
        leave()
        strategy.join()


def leave_block_by_an_error(spec: str) -> None:
    """Leaves a strategy's block by an error of the program, and then by one of a function."""
    running: list[coordinator.Future] = []
    with pytest.raises(ZeroDivisionError):
        leave_by(spec, running, lambda: 1 // 0)
    assert isinstance(running[0].exception(timeout=0), coordinator.ClosureCancelledError)
    with pytest.raises(tf.errors.InvalidArgumentError), connect(spec) as strategy:
        strategy.schedule(tf.function(lambda: tf.debugging.assert_equal(1, tf.identity(2))))


def interrupt_join(spec: str) -> None:
    """Presses Ctrl-C while the main thread is in `join`."""
    interrupter = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        leave_by(spec, [], interrupter.start)


def forget(spec: str) -> None:
    """Deletes a strategy; garbage collection closes it."""
    forgotten = connect(spec)
    model = trained_model(forgotten)
    del forgotten, model
    gc.collect()


def fail_while_it_is_made(spec: str) -> None:
    """Creates strategies, in each of which another part cannot be created."""
    for owner, name in (
        (membership, "Heartbeat"),
        (strategy_parts, "keras_extended"),
        (scheduler.Cluster, "start"),
        (parameter_server_strategy, "DatasetDistribution"),
    ):
        with (
            mock.patch.object(owner, name, side_effect=MemoryError(name)),
            pytest.raises(MemoryError, match=name),
        ):
            connect(spec)


def end_in_order(strategy: coordinator.ParameterServerStrategy) -> None:
    """Leaves the blocks of the parent, and runs the finalizers."""
    sys.exit(0)


def use(strategy: coordinator.ParameterServerStrategy) -> None:
    """Tries to use the strategy of the parent, closes it, and ends as a process of a pool does."""
    gc.collect()
    for refused in (strategy.join, strategy.done, strategy.cancel_all, strategy.quiet):
        with pytest.raises(RuntimeError, match="from which this process"):
            refused()
    strategy.close()
    os._exit(0)


def fork(spec: str) -> None:
    """Forks processes that end in several ways, and trains on."""
    steps = 20
    with connect(spec) as strategy:
        with strategy.scope():
            count = tf.Variable(0)
        # Deleted by the child that ends in order, as Python does at the end.
        others = [strategy.schedule(tf.function(lambda: tf.range(3)), fetch=False) for _ in range(3)]
        step = tf.function(lambda: count.assign_add(1))
        for child in (end_in_order, use):
            for _ in range(steps):
                strategy.schedule(step)
            strategy.join(TIMEOUT)
            process = os.fork()
            if not process:
                child(strategy)
            _, status = os.waitpid(process, 0)
            assert os.waitstatus_to_exitcode(status) == 0, child
        with multiprocessing.get_context("fork").Pool(2) as pool:
            assert pool.map(abs, range(-4, 0)) == [4, 3, 2, 1]
        assert strategy.schedule(step).result(TIMEOUT) == 2 * steps + 1
        assert [other.result(TIMEOUT).tolist() for other in others] == [[0, 1, 2]] * 3
        assert not [each for each in strategy.events.since(0)[0] if "lost" in each.kind]


def close_while_generators_wait(spec: str) -> None:
    """Closes although every worker waits for a generator here, and may be silent for very long before it is lost."""
    waiting, closed = threading.Semaphore(0), threading.Event()

    def elements() -> Iterator[float]:
        yield 1.0
        waiting.release()
        closed.wait()

    strategy = connect(spec, close_timeout=0.5, heartbeat_timeout=1000.0)
    dataset = tf.data.Dataset.from_generator(elements, output_signature=tf.TensorSpec([])).prefetch(2)
    iterator = iter(strategy.experimental_distribute_dataset(dataset))
    step = tf.function(lambda iterator: next(iterator))  # noqa: PLW0108 - a builtin has no signature
    for _ in range(2 * len(strategy.cluster.workers)):
        strategy.schedule(step, args=(iterator,))
    assert waiting.acquire(timeout=TIMEOUT)
    strategy.close()
    # Each generator that waits occupies one of TensorFlow's threads, of which there may be only two.
    closed.set()


def end_while_functions_run(spec: str) -> None:
    """Ends the program without closing the strategy, while functions run on all workers that are alive."""
    strategy = connect(spec)
    Gate(strategy).occupy(sum(worker.healthy() for worker in strategy.cluster.workers))
    for _ in range(1_000):
        strategy.schedule(one)


def close_in_every_way_then_end(spec: str) -> None:
    """Closes several strategies, each in another way; the last one runs functions when the program ends."""
    os.environ["GRPC_FAIL_FAST"] = "use_caller"
    # The process keeps the port on which workers call back from its first strategy on.
    with connect(spec) as first:
        assert first.schedule(one).result(TIMEOUT) == 1
        copied = first.create_per_worker_resource(lambda: tf.Variable(2))
        read = tf.function(copied.read_value)
        assert first.schedule(read).result(TIMEOUT) == 2
    with connect(spec) as second, pytest.raises(ValueError, match="had a value on each worker of a strategy that was"):
        second.schedule(read)
    for close in (leave_block, leave_block_by_an_error, interrupt_join, fail_while_it_is_made, forget):
        with nothing_left_behind():
            close(spec)
    fork(spec)
    close_while_generators_wait(spec)
    end_while_functions_run(spec)


def reset_tensorflow(spec: str) -> None:
    """Resets TensorFlow under an open strategy, as test suites do between two tests, and ends so."""
    # What a program calls that had imported it before the strategy was made.
    unwatched = getattr(context, RESET)
    for reset in (None, unwatched):
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
    assert strategy.schedule(tf.function(lambda: 1 + coordinator.get_current_worker_index())).result(TIMEOUT) > 0
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


ENDINGS: dict[str, Callable[[str], None]] = {
    function.__name__: function for function in (close_in_every_way_then_end, reset_tensorflow, end_while_functions_run)
}


if __name__ == "__main__":
    ENDINGS[sys.argv[2]](sys.argv[1])
