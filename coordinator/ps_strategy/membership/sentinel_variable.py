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
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from coordinator.ps_strategy import tensorflow_internals
from coordinator.ps_strategy.failure_table import UNREACHED
from coordinator.ps_strategy.membership.bounded_calls import call_within
from coordinator.ps_strategy.membership.cluster_definition import Task

_TRIES = 10
_PAUSE = 0.3
_THREAD = "coordinator-witness"

_logger = logging.getLogger("coordinator")


class Witness:
    """Is on one parameter server for as long as our variables are.

    Args:
      device: the parameter server's CPU.
      longest_call: how long to wait for one answer, in seconds; longer than a frozen server is waited for.

    Raises:
      tf.errors.OpError: the server could not be reached.
      TimeoutError: it has not answered in time.
    """

    def __init__(self, device: str, longest_call: float) -> None:
        def make() -> tf.Variable:
            with tf.device(device):
                return tf.Variable(True, trainable=False, name="coordinator_witness")

        self._longest_call = longest_call
        self._variable = call_within(longest_call, _THREAD, make)

    @property
    def device(self) -> str:
        """Where it is."""
        return str(self._variable.device)

    def is_reached(self) -> bool:
        """Whether TensorFlow's connection to the server serves now, whatever the server answers."""
        try:
            self._read()
        except (tf.errors.UnavailableError, tf.errors.DeadlineExceededError, TimeoutError):
            return False
        except tf.errors.OpError:
            pass  # The server answered, and the variable is gone: that is what `is_there` tells.
        return True

    def is_there(self) -> bool:
        """Whether it can be read. A refused connection is tried again for about three seconds.

        A read that takes too long, although the heartbeat has not hung up, says nothing about the variable.
        """
        pause = threading.Event()
        for _ in range(_TRIES):
            try:
                return self._read()
            except TimeoutError:
                return True
            except UNREACHED:
                pause.wait(_PAUSE)
            except tf.errors.OpError:
                return False
        return False

    def value(self) -> Any:
        """Builds, in a function, its value, which is true, on its server."""
        with tf.device(self.device):
            return self._variable.read_value()

    def answer(self) -> Any:
        """Builds, in a function, a question that goes to the server and comes back: a bool scalar, which is true."""
        sent = tf.timestamp() > 0.0
        with tf.device(self.device):
            return tf.logical_and(self.value(), sent)

    def _read(self) -> bool:
        """Its value, which is true. A `tf.errors.OpError`: it is gone, or the server could not be reached."""
        return bool(call_within(self._longest_call, _THREAD, self._variable.numpy))


class Witnesses:
    """The witnesses on all parameter servers, by the numbers of the connections to these.

    Args:
      longest_call: how long to wait for one answer, in seconds; longer than a frozen server is waited for.
    """

    def __init__(self, longest_call: float) -> None:
        self._longest_call = longest_call
        self._witnesses: dict[int, Witness] = {}
        self._gone: set[int] = set()
        self._traced: tuple[tuple[int, ...], Any] | None = None
        self._turns: dict[Task, threading.Lock] = {}

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
                    self._witnesses[number] = Witness(f"{device}/device:CPU:0", self._longest_call)
                except (tf.errors.OpError, TimeoutError) as error:
                    _logger.info("%s was lost as soon as it was connected to: %s", device, error)
                    lost.add(device)
        return lost

    def are_reached(self, numbers: Iterable[int]) -> bool:
        """Whether TensorFlow's connections to all of these parameter servers serve now."""
        return all(self._witnesses[number].is_reached() for number in numbers)

    def question(self, numbers: Iterable[int]) -> None:
        """Notes which of them are gone, after something that may have cost parameter servers what they had."""
        self._gone.update(number for number in numbers if not self._witnesses[number].is_there())

    def are_gone(self, number: int) -> bool:
        """Whether what was made over a connection is gone, as it was found when asked last."""
        return number in self._gone

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
        try:
            answers = self._answers(tuple(numbers))
        except tf.errors.OpError as error:
            _logger.info("The workers could not be asked whether they reach the parameter servers: %s", error)
            return list(workers)
        reach = functools.partial(self._reaches, answers)
        with concurrent.futures.ThreadPoolExecutor(len(workers), "coordinator-reach") as threads:
            return [worker for worker, did in zip(workers, threads.map(reach, workers), strict=True) if not did]

    def reach_each_other(self, numbers: Sequence[int]) -> bool:
        """Makes each of some parameter servers reach all others, for the same reason. Returns True if they do."""
        witnesses = [self._witnesses[number] for number in numbers]

        def read_all_everywhere() -> Any:
            found = []
            for reader in witnesses:
                values = [each.value() for each in witnesses]
                with tf.device(reader.device):
                    found.append(tf.reduce_all(values))
            return tf.reduce_all(found)

        try:
            concrete = tf.function(read_all_everywhere, autograph=False).get_concrete_function()
        except tf.errors.OpError:
            return False
        return _is_run_on(None, concrete, self._longest_call)

    def _answers(self, numbers: tuple[int, ...]) -> Any:
        """The function that a worker runs to reach these parameter servers; traced once for the same ones."""
        if self._traced is None or self._traced[0] != numbers:
            witnesses = [self._witnesses[number] for number in numbers]
            function = tf.function(lambda: tf.reduce_all([each.answer() for each in witnesses]), autograph=False)
            self._traced = numbers, function.get_concrete_function()
        return self._traced[1]

    def _reaches(self, answers: Any, worker: Task) -> bool:
        # Two calls at once on one worker that both need two servers may wait for each other for ever.
        with self._turns.setdefault(worker, threading.Lock()):
            return _is_run_on(f"{worker.device}/device:CPU:0", answers, self._longest_call)


def _is_run_on(device: str | None, concrete: Any, seconds: float) -> bool:
    """Whether a function runs without error, tried again and again within some seconds.

    Args:
      device: of the worker; None for the client.
      concrete: the function.
      seconds: after which the call is cancelled.
    """
    cancellation = tensorflow_internals.CancellationManager()

    def run() -> None:
        with tf.device(device):
            tensorflow_internals.call(concrete, concrete.captured_inputs, cancellation)

    pause = threading.Event()
    deadline = time.monotonic() + seconds
    for _ in range(_TRIES):
        try:
            call_within(deadline - time.monotonic(), _THREAD, run)
        except TimeoutError:
            cancellation.cancel()
            return False
        except tf.errors.OpError:
            pause.wait(_PAUSE)
        else:
            return True
    return False
