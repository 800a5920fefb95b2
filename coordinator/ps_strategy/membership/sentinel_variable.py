"""A small variable on each server. If it is gone, all variables there are gone.

When TensorFlow's server definition is updated while a server is out of TensorFlow's reach, TensorFlow takes that server
for a new one and drops what was on it, although the same process lives on. Only the loss of a variable shows that. A
server may answer a probe and yet be out of TensorFlow's reach: TensorFlow's own connection was shut down, and is tried
again only after a pause. So sentinels are read before such an update too.
"""

import logging
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import tensorflow as tf

from coordinator.ps_strategy.membership.bounded_calls import UNREACHED, call_within, in_parallel
from coordinator.ps_strategy.membership.cluster_definition import Task
from coordinator.ps_strategy.tensorflow_internals.calls import CancellationManager, call_concrete

_TRIES = 10
_PAUSE = 0.3
_THREAD = "coordinator-sentinel"

_logger = logging.getLogger("coordinator")


class SentinelVariables:
    """The sentinels on all servers, by the numbers of the connections to these. All are asked in parallel.

    Each exists for as long as the other variables on its server do.

    Args:
      longest_call: how long to wait for one answer, in seconds; longer than a frozen server is waited for.
    """

    def __init__(self, longest_call: float) -> None:
        self._longest_call = longest_call
        self._sentinels: dict[int, tf.Variable] = {}
        self._traced: tuple[tuple[int, ...], Any] | None = None
        self._turns: dict[Task, threading.Lock] = {}

    def place(self, devices: Mapping[int, str]) -> set[int]:
        """Creates the sentinels that servers lack, and drops those of servers that are no longer connected.

        Args:
          devices: of all connected servers, by the numbers of the connections.

        Returns:
          The numbers of the connections that were lost before their sentinel could be created.
        """

        def create(number: int) -> tf.Variable:
            with tf.device(f"{devices[number]}/device:CPU:0"):
                return tf.Variable(True, trainable=False, name="coordinator_sentinel")

        def try_create(number: int) -> None:
            try:
                self._sentinels[number] = call_within(self._longest_call, _THREAD, lambda: create(number))
            except (tf.errors.OpError, TimeoutError) as error:
                _logger.info("%s was lost immediately after connecting; it is tried again.", devices[number])
                _logger.debug("The call that failed:", exc_info=error)

        self._sentinels = {number: each for number, each in self._sentinels.items() if number in devices}
        in_parallel(_THREAD, try_create, devices.keys() - self._sentinels.keys())
        return devices.keys() - self._sentinels.keys()

    def are_reachable(self, numbers: Collection[int]) -> bool:
        """Returns True if TensorFlow's connections to all of these servers work now, whatever the servers answer."""
        return all(in_parallel(_THREAD, self._is_reachable, numbers).values())

    def gone(self, numbers: Collection[int]) -> set[int]:
        """Returns which of them are gone, after an update that may have cost servers their variables."""
        found = in_parallel(_THREAD, self._exists, numbers)
        return {number for number, exists in found.items() if not exists}

    def unreached_from(self, workers: Sequence[Task], numbers: Sequence[int]) -> list[Task]:
        """Makes each worker call each parameter server and receive an answer.

        TensorFlow tries a refused connection again only after a pause, and until then every call from that worker to
        that server fails. So this tries for some seconds.

        Args:
          workers: all connected.
          numbers: of the connections to the parameter servers.

        Returns:
          The workers that could not.
        """
        if not workers:
            return []
        traced = self._traced
        if traced is None or traced[0] != tuple(numbers):
            sentinels = self._present(numbers)
            if len(sentinels) < len(numbers):
                return list(workers)
            try:
                concrete = tf.function(lambda: _round_trips(sentinels), autograph=False).get_concrete_function()
            except tf.errors.OpError as error:
                _logger.info("The workers could not be asked whether they reach the parameter servers.")
                _logger.debug("The call that failed:", exc_info=error)
                return list(workers)
            self._traced = traced = tuple(numbers), concrete

        def reaches(worker: Task) -> bool:
            # Two simultaneous calls on one worker that both need two servers may wait for each other for ever.
            with self._turns.setdefault(worker, threading.Lock()):
                return _succeeds(f"{worker.device}/device:CPU:0", traced[1], self._longest_call)

        reached = in_parallel("coordinator-reach", reaches, workers)
        return [worker for worker in workers if not reached[worker]]

    def reach_each_other(self, numbers: Sequence[int]) -> bool:
        """Has each of some parameter servers reach all others, for the same reason. Returns True if they do."""
        sentinels = self._present(numbers)
        if len(sentinels) < len(numbers):
            return False

        def round_trips_from_each() -> Any:
            found = []
            for sentinel in sentinels:
                with tf.device(sentinel.device):
                    found.append(_round_trips(sentinels))
            return tf.reduce_all(found)

        try:
            concrete = tf.function(round_trips_from_each, autograph=False).get_concrete_function()
        except tf.errors.OpError:
            return False
        return _succeeds(None, concrete, self._longest_call)

    def _present(self, numbers: Sequence[int]) -> list[tf.Variable]:
        """Returns the sentinels of these servers; fewer if one was lost meanwhile."""
        return [self._sentinels[number] for number in numbers if number in self._sentinels]

    def _read(self, number: int) -> bool:
        return bool(call_within(self._longest_call, _THREAD, self._sentinels[number].numpy))

    def _is_reachable(self, number: int) -> bool:
        try:
            self._read(number)
        except (tf.errors.UnavailableError, tf.errors.DeadlineExceededError, TimeoutError):
            return False
        except tf.errors.OpError:
            pass  # The server answered, and the variable is gone, which `gone` finds out.
        return True

    def _exists(self, number: int) -> bool:
        """Returns True if a sentinel can be read. A refused connection is tried again for about three seconds.

        A read that takes too long, although the heartbeat has not shut down the connection, proves no loss.
        """
        pause = threading.Event()
        for _ in range(_TRIES):
            try:
                return self._read(number)
            except TimeoutError:
                return True
            except UNREACHED:
                pause.wait(_PAUSE)
            except tf.errors.OpError:
                return False
        return False


def _round_trips(sentinels: Sequence[tf.Variable]) -> Any:
    """Adds to a function a message to the server of each sentinel, and the answers. Returns a scalar, which is true."""
    sent = tf.timestamp() > 0.0
    answers = []
    for sentinel in sentinels:
        with tf.device(sentinel.device):
            answers.append(tf.logical_and(sentinel.read_value(), sent))
    return tf.reduce_all(answers)


def _succeeds(device: str | None, concrete: Any, seconds: float) -> bool:
    """Returns True if a function runs without error, tried again and again within some seconds.

    Args:
      device: of the worker; None for the client.
      concrete: the function.
      seconds: after which the call is cancelled.
    """
    cancellation = CancellationManager()

    def run() -> None:
        with tf.device(device):
            call_concrete(concrete, concrete.captured_inputs, cancellation)

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
