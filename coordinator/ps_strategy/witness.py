"""A variable of the library's own on each parameter server, which tells whether what was made there still exists.

When TensorFlow is told of a change of the cluster while it cannot reach a server, it takes that server for a new one
and drops what was on it, although the same process goes on. Nothing but the loss of a variable shows that. A server
may answer a probe and yet be out of TensorFlow's reach: its own connection was cut off, and is tried again only after
a pause. So witnesses are read before such a change too.
"""

import concurrent.futures
import functools
import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import tensorflow as tf

from coordinator.ps_strategy import tensorflow_internals
from coordinator.ps_strategy.cluster_change import on_own_thread
from coordinator.ps_strategy.cluster_definition import Task
from coordinator.ps_strategy.failure_table import UNREACHED

_TRIES = 10
_PAUSE = 0.3
# In seconds; longer than a frozen server is waited for, by default.
_LONGEST_CALL = 10.0

_logger = logging.getLogger("coordinator")

Result = TypeVar("Result")


class Witness:
    """Is on one parameter server for as long as our variables are.

    Args:
      device: the parameter server's CPU.

    Raises:
      tf.errors.OpError: the server could not be reached.
    """

    def __init__(self, device: str) -> None:
        def make() -> tf.Variable:
            with tf.device(device):
                return tf.Variable(True, trainable=False, name="coordinator_witness")

        self._variable = _apart(make)

    def is_reached(self) -> bool:
        """Whether TensorFlow's connection to the server serves now, whatever the server answers."""
        try:
            self._read()
        except (tf.errors.UnavailableError, tf.errors.DeadlineExceededError):
            return False
        except tf.errors.OpError:
            pass  # The server answered, and the variable is gone: that is what `is_there` tells.
        return True

    def is_there(self) -> bool:
        """Whether it can be read. A refused connection is tried again for about three seconds.

        A read that takes too long says nothing about the variable.
        """
        pause = threading.Event()
        for _ in range(_TRIES):
            try:
                return self._read()
            except tf.errors.DeadlineExceededError:
                return True
            except UNREACHED:
                pause.wait(_PAUSE)
            except tf.errors.OpError:
                return False
        return False

    def answer(self) -> Any:
        """Builds, in a function, a question that goes to the server and comes back: a bool scalar, which is true."""
        sent = tf.timestamp() > 0.0
        with tf.device(self._variable.device):
            return tf.logical_and(self._variable.read_value(), sent)

    def _read(self) -> bool:
        """Its value, which is true. A `tf.errors.OpError`: it is gone, or the server could not be reached."""
        return bool(_apart(self._variable.numpy))


class Witnesses:
    """The witnesses on all parameter servers, by the numbers of the connections to these."""

    def __init__(self) -> None:
        self._witnesses: dict[int, Witness] = {}
        self._gone: set[int] = set()
        self._traced: tuple[tuple[int, ...], Any] | None = None
        self._turn = threading.Lock()

    def place(self, numbers: Mapping[str, int]) -> set[str]:
        """Sees to it that each parameter server has one.

        Args:
          numbers: of the connections, by the servers' devices.

        Returns:
          The devices of those that were lost before it could be placed.
        """
        lost = set()
        for device, number in numbers.items():
            if number not in self._witnesses:
                try:
                    self._witnesses[number] = Witness(f"{device}/device:CPU:0")
                except tf.errors.OpError as error:
                    _logger.info("%s was lost as soon as it was connected to: %s", device, error.message)
                    lost.add(device)
        return lost

    def are_reached(self, numbers: Iterable[int]) -> bool:
        """Whether TensorFlow's connections to all of these parameter servers serve now."""
        return all(self._witnesses[number].is_reached() for number in numbers)

    def question(self, numbers: Iterable[int]) -> None:
        """Notes which of them are gone, after something that may have cost parameter servers what they had."""
        self._gone.update(number for number in numbers if not self._witnesses[number].is_there())

    def unreached_from(self, workers: Sequence[Task], numbers: Sequence[int]) -> list[Task]:
        """Has each of some workers reach each of some parameter servers, and these the workers.

        TensorFlow tries a connection that was refused again only after a pause, and until then every call from that
        worker to that server fails. So this tries for some seconds.

        Args:
          workers: all connected to.
          numbers: of the connections to the parameter servers.

        Returns:
          The workers that could not.
        """
        if not workers:
            return []
        # Two calls at once on one worker that both need two servers may wait for each other for ever.
        with self._turn:
            reach = functools.partial(_is_run_on, self._reaching(tuple(numbers)))
            with concurrent.futures.ThreadPoolExecutor(len(workers), "coordinator-reach") as threads:
                return [worker for worker, did in zip(workers, threads.map(reach, workers), strict=True) if not did]

    def _reaching(self, numbers: tuple[int, ...]) -> Any:
        """The function that a worker runs to reach these parameter servers; traced once for the same ones."""
        if self._traced is None or self._traced[0] != numbers:
            witnesses = [self._witnesses[number] for number in numbers]
            function = tf.function(lambda: tf.reduce_all([each.answer() for each in witnesses]), autograph=False)
            self._traced = numbers, function.get_concrete_function()
        return self._traced[1]

    def are_gone(self, number: int) -> bool:
        """Whether what was made over a connection is gone, as it was found when asked last."""
        return number in self._gone


def _is_run_on(concrete: Any, worker: Task) -> bool:
    """Whether a worker runs a function without error, tried for some seconds."""

    def run() -> None:
        with tf.device(f"{worker.device}/device:CPU:0"):
            tensorflow_internals.call(concrete, concrete.captured_inputs, tensorflow_internals.CancellationManager())

    pause = threading.Event()
    for _ in range(_TRIES):
        try:
            _apart(run)
        except tf.errors.DeadlineExceededError:
            return False
        except tf.errors.OpError:
            pause.wait(_PAUSE)
        else:
            return True
    return False


def _apart(call: Callable[[], Result]) -> Result:
    """Calls on a new thread, and waits for a limited time: all of this process's threads may be busy.

    Raises:
      tf.errors.DeadlineExceededError: the call has not returned in time.
      tf.errors.OpError: it raised that.
    """
    called = on_own_thread("coordinator-witness", call)
    try:
        return called.result(_LONGEST_CALL)
    except concurrent.futures.TimeoutError:
        message = f"TensorFlow has not read a variable in {_LONGEST_CALL:g} s."
        raise tf.errors.DeadlineExceededError(None, None, message) from None
