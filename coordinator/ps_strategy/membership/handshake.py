"""Which servers take part, of those that TensorFlow has just been connected to.

    answers --> same devices as other workers --> connected --> same TensorFlow version
                                                                 --> registered there (`client_registry`) --> admitted

Promises: nothing runs on a server of another TensorFlow, unless `Options.version_mismatch` allows it, nor on a worker
with other devices than the rest; such a server is checked once in its life; a server that dies meanwhile is not
admitted.
"""

import logging
from collections.abc import Mapping

import tensorflow as tf

from coordinator.errors import DeviceMismatchError, VersionMismatchError
from coordinator.heartbeat.task_probe import TaskStatus
from coordinator.options import Options
from coordinator.ps_strategy.membership.bounded_calls import call_within, in_parallel
from coordinator.ps_strategy.membership.client_registry import Client, register
from coordinator.ps_strategy.membership.cluster_change import Connection
from coordinator.ps_strategy.membership.cluster_definition import Task
from coordinator.ps_strategy.membership.worker_devices import WorkerDevices

_logger = logging.getLogger("coordinator")

# In seconds; former clients have to be asked, too.
_LONGEST_HANDSHAKE = 30.0


class Handshake:
    """Checks servers that are new. One thread at a time may call `admit`.

    Args:
      client: this process.
      options: time limits, and what to do about another TensorFlow.

    Attributes:
      refused: the incarnations of the servers that take no part, and what to raise about each.
      devices: those of each worker; None while no worker has answered.
    """

    def __init__(self, client: Client, options: Options) -> None:
        self._client = client
        self._probe_timeout = options.probe_timeout
        self._is_mismatch_error = options.version_mismatch == "error"
        self.refused: dict[int, VersionMismatchError | DeviceMismatchError] = {}
        self.devices: WorkerDevices | None = None

    def check_devices(self, statuses: Mapping[Task, TaskStatus], addresses: Mapping[Task, str]) -> None:
        """Refuses workers that have other devices than the first worker that answered.

        Args:
          statuses: what servers answered.
          addresses: `host:port` of each server.
        """
        for task in sorted(task for task in statuses if task.job == "worker"):
            status = statuses[task]
            theirs = WorkerDevices.of(status.devices)
            self.devices = self.devices or theirs
            if theirs != self.devices and status.incarnation not in self.refused:
                error = DeviceMismatchError(
                    f"{task} ({addresses[task]}) has {theirs}, and the other workers have {self.devices}. Functions "
                    "are traced once for all workers, with one replica for each device: start it with as many devices "
                    "(`coordinator serve --devices`, or CUDA_VISIBLE_DEVICES for GPUs)."
                )
                _logger.error("%s It takes no part.", error)
                self.refused[status.incarnation] = error

    def admit(self, new: Mapping[Task, Connection], addresses: Mapping[Task, str]) -> dict[Task, Connection]:
        """Makes the handshake with servers, all at once.

        Args:
          new: the connections that TensorFlow has just made.
          addresses: `host:port` of each server.

        Returns:
          The connections to those that take part.
        """
        succeeded = in_parallel(
            "coordinator-handshakes",
            lambda task: self._handshake(task, addresses[task], new[task].incarnation),
            new,
        )
        return {task: connection for task, connection in new.items() if succeeded[task]}

    def _handshake(self, task: Task, address: str, incarnation: int) -> bool:
        def check_and_register() -> None:
            check_version(task.device, address, is_error=self._is_mismatch_error)
            register(self._client, task.device, address, self._probe_timeout)

        try:
            call_within(_LONGEST_HANDSHAKE, "coordinator-handshake", check_and_register)
        except VersionMismatchError as error:
            _logger.error("%s It takes no part.", error)
            self.refused[incarnation] = error
            return False
        except (tf.errors.OpError, TimeoutError) as error:
            _logger.info("%s (%s) was lost during the handshake; it is tried again.", task, address)
            _logger.debug("The call of the handshake that failed:", exc_info=error)
            return False
        return True


def check_version(device: str, address: str, *, is_error: bool) -> None:
    """Compares the TensorFlow version of a connected server with that of this program.

    Args:
      device: the server's name, such as `/job:ps/replica:0/task:0`.
      address: its `host:port`.
      is_error: whether a difference is raised; otherwise it is logged as a warning.

    Raises:
      VersionMismatchError: the server runs another release.
      tf.errors.UnavailableError: the server is gone.
    """
    theirs, ours = graph_version(device), tf.version.GRAPH_DEF_VERSION
    if theirs == ours:
        return
    if theirs is None:
        difference = "another TensorFlow, whose graphs cannot be read here,"
    else:
        difference = f"{'an older' if theirs < ours else 'a newer'} TensorFlow (graph version {theirs}, not {ours})"
    message = (
        f"{device} ({address}) runs {difference} than this program, which runs {tf.version.VERSION}. Install the same "
        'TensorFlow on both, or create the strategy with Options(version_mismatch="warn") to try it as it is.'
    )
    if is_error:
        raise VersionMismatchError(message)
    _logger.warning(message)


def graph_version(device: str) -> int | None:
    """Returns the version of the graphs that a server writes; None if its TensorFlow does not do that as ours does.

    Raises:
      tf.errors.UnavailableError: the server is gone.
    """
    try:
        # The constants too are created there: the first operation that this process computes itself takes much longer.
        with tf.device(f"{device}/device:CPU:0"):
            zero, one = (tf.constant(number, tf.int64) for number in (0, 1))
            dataset = tf.raw_ops.RangeDataset(
                start=zero, stop=zero, step=one, output_types=[tf.int64], output_shapes=[[]]
            )
            written = tf.raw_ops.DatasetToGraphV2(input_dataset=dataset).numpy()
    except (tf.errors.NotFoundError, tf.errors.InvalidArgumentError, tf.errors.UnimplementedError):
        return None
    return tf.compat.v1.GraphDef.FromString(written).versions.producer
