"""A small variable on each parameter server, by which the loss of all variables there is noticed.

When TensorFlow's server definition is updated while a server is out of TensorFlow's reach, TensorFlow takes that server
for a new one and drops what was on it, although the same process lives on. Only the loss of a variable shows that. A
server may answer a probe and yet be out of TensorFlow's reach: TensorFlow's own connection was shut down, and is tried
again only after a pause. So sentinels are read before such an update too.
"""

import functools
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


class SentinelVariable:
    """Exists on one parameter server for as long as the user's variables do.

    Args:
      device: the parameter server's CPU.
      longest_call: how long to wait for one answer, in seconds; longer than a frozen server is waited for.

    Raises:
      tf.errors.OpError: the server could not be reached.
      TimeoutError: it has not answered in time.
    """

    def __init__(self, device: str, longest_call: float) -> None:
        def create() -> tf.Variable:
            with tf.device(device):
                return tf.Variable(True, trainable=False, name="coordinator_sentinel")

        self._longest_call = longest_call
        self._variable = call_within(longest_call, _THREAD, create)

    @property
    def device(self) -> str:
        """The parameter server's CPU."""
        return str(self._variable.device)

    def is_reachable(self) -> bool:
        """Returns True if TensorFlow's connection to the server works now, whatever the server answers."""
        try:
            self._read()
        except (tf.errors.UnavailableError, tf.errors.DeadlineExceededError, TimeoutError):
            return False
        except tf.errors.OpError:
            pass  # The server answered, and the variable is gone, which `exists` finds out.
        return True

    def exists(self) -> bool:
        """Returns True if the variable can be read. A refused connection is tried again for about three seconds.

        A read that takes too long, although the heartbeat has not shut down the connection, proves no loss.
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

    def build_read(self) -> Any:
        """Adds to a function a read of the variable, on its server. Returns a scalar tensor, which is true."""
        with tf.device(self.device):
            return self._variable.read_value()

    def build_round_trip(self) -> Any:
        """Adds to a function a message to the server and its answer. Returns a bool scalar tensor, which is true."""
        sent = tf.timestamp() > 0.0
        with tf.device(self.device):
            return tf.logical_and(self.build_read(), sent)

    def _read(self) -> bool:
        return bool(call_within(self._longest_call, _THREAD, self._variable.numpy))


class SentinelVariables:
    """The sentinels on all parameter servers, by the numbers of the connections to these. All are asked in parallel.

    Args:
      longest_call: how long to wait for one answer, in seconds; longer than a frozen server is waited for.
    """

    def __init__(self, longest_call: float) -> None:
        self._longest_call = longest_call
        self._sentinels: dict[int, SentinelVariable] = {}
        self._gone: set[int] = set()
        self._traced: tuple[tuple[int, ...], Any] | None = None
        self._turns: dict[Task, threading.Lock] = {}

    def place(self, numbers: Mapping[str, int]) -> set[str]:
        """Creates the sentinels that parameter servers lack.

        Args:
          numbers: of the connections, by the servers' devices.

        Returns:
          The devices of those that were lost before it could be created.
        """

        def create(device: str) -> SentinelVariable | None:
            try:
                return SentinelVariable(f"{device}/device:CPU:0", self._longest_call)
            except (tf.errors.OpError, TimeoutError) as error:
                _logger.info("%s was lost immediately after connecting; it is tried again: %s", device, error)
                return None

        missing = [device for device, number in numbers.items() if number not in self._sentinels]
        created = in_parallel(_THREAD, create, missing)
        self._sentinels |= {numbers[device]: found for device, found in created.items() if found is not None}
        return {device for device, found in created.items() if found is None}

    def are_reachable(self, numbers: Collection[int]) -> bool:
        """Returns True if TensorFlow's connections to all of these parameter servers work now."""
        return all(in_parallel(_THREAD, lambda number: self._sentinels[number].is_reachable(), numbers).values())

    def check(self, numbers: Collection[int]) -> None:
        """Finds out which of them are gone, after an update that may have cost parameter servers their variables."""
        found = in_parallel(_THREAD, lambda number: self._sentinels[number].exists(), numbers)
        self._gone.update(number for number, exists in found.items() if not exists)

    def is_gone(self, number: int) -> bool:
        """Returns True if the last check found that what was created over a connection is gone."""
        return number in self._gone

    def unreached_from(self, workers: Sequence[Task], numbers: Sequence[int]) -> list[Task]:
        """Has each of some workers reach each of some parameter servers, and these the workers.

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
        try:
            round_trips = self._round_trips(tuple(numbers))
        except tf.errors.OpError as error:
            _logger.info("The workers could not be asked whether they reach the parameter servers: %s", error)
            return list(workers)
        reached = in_parallel("coordinator-reach", functools.partial(self._reaches, round_trips), workers)
        return [worker for worker in workers if not reached[worker]]

    def reach_each_other(self, numbers: Sequence[int]) -> bool:
        """Has each of some parameter servers reach all others, for the same reason. Returns True if they do."""
        sentinels = [self._sentinels[number] for number in numbers]

        def read_all_everywhere() -> Any:
            found = []
            for reader in sentinels:
                values = [each.build_read() for each in sentinels]
                with tf.device(reader.device):
                    found.append(tf.reduce_all(values))
            return tf.reduce_all(found)

        try:
            concrete = tf.function(read_all_everywhere, autograph=False).get_concrete_function()
        except tf.errors.OpError:
            return False
        return _succeeds(None, concrete, self._longest_call)

    def _round_trips(self, numbers: tuple[int, ...]) -> Any:
        """Returns the function by which a worker reaches these parameter servers; traced once for the same ones."""
        if self._traced is None or self._traced[0] != numbers:
            sentinels = [self._sentinels[number] for number in numbers]

            def reach_all() -> Any:
                return tf.reduce_all([each.build_round_trip() for each in sentinels])

            self._traced = numbers, tf.function(reach_all, autograph=False).get_concrete_function()
        return self._traced[1]

    def _reaches(self, round_trips: Any, worker: Task) -> bool:
        # Two simultaneous calls on one worker that both need two servers may wait for each other for ever.
        with self._turns.setdefault(worker, threading.Lock()):
            return _succeeds(f"{worker.device}/device:CPU:0", round_trips, self._longest_call)


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
