"""A variable of the library's own on each parameter server, which tells whether what was made there still exists.

When TensorFlow is told of a change of the cluster while it cannot reach a server, it takes that server for a new one
and drops what was on it, although the same process goes on. Nothing but the loss of a variable shows that. A server
may answer a probe and yet be out of TensorFlow's reach: its own connection was cut off, and is tried again only after
a pause. So witnesses are read before such a change too.
"""

import concurrent.futures
import logging
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

import tensorflow as tf

from coordinator.ps_strategy import tensorflow_internals
from coordinator.ps_strategy.failure_table import UNREACHED

_TRIES = 10
_PAUSE = 0.3

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
        """Whether it can be read. A refused connection is tried again for about three seconds."""
        pause = threading.Event()
        for _ in range(_TRIES):
            try:
                return self._read()
            except UNREACHED:
                pause.wait(_PAUSE)
            except tf.errors.OpError:
                return False
        return False

    def _read(self) -> bool:
        """Its value, which is true. A `tf.errors.OpError`: it is gone, or the server could not be reached."""
        return bool(_apart(self._variable.numpy))


class Witnesses:
    """The witnesses on all parameter servers, by the numbers of the connections to these."""

    def __init__(self) -> None:
        self._witnesses: dict[int, Witness] = {}
        self._gone: set[int] = set()

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

    def are_gone(self, number: int) -> bool:
        """Whether what was made over a connection is gone, as it was found when asked last."""
        return number in self._gone


def _apart(call: Callable[[], Result]) -> Result:
    """Calls on a thread of its own: an error stays with the executor of the thread that saw it."""

    def run() -> Result:
        with tensorflow_internals.own_executor():
            return call()

    with concurrent.futures.ThreadPoolExecutor(1, "coordinator-witness") as thread:
        return thread.submit(run).result()
