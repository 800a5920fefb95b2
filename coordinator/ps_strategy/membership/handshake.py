"""Admits servers that TensorFlow was just connected to, and checks that servers still have their variables.

    answers --> same devices as other workers --> connected --> same TensorFlow version
                                                                 --> registered there (`clients.register`) --> admitted

Promises: nothing runs on a server of another TensorFlow, unless `Options.version_mismatch` allows it, or on a worker
whose devices differ from the other workers' devices. Each process of a server is checked once. A server that dies
during its handshake is not admitted.
"""

import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import tensorflow as tf

from coordinator.errors import DeviceMismatchError, VersionMismatchError
from coordinator.heartbeat.probes import TaskStatus
from coordinator.options import Options
from coordinator.ps_strategy.membership.bounded_calls import UNREACHED, call_within, in_parallel
from coordinator.ps_strategy.membership.clients import Client, register
from coordinator.ps_strategy.membership.cluster_change import Connection
from coordinator.ps_strategy.membership.cluster_definition import Task
from coordinator.ps_strategy.tensorflow_internals.functions import CancellationManager, call_concrete

_TRIES = 10
_PAUSE = 0.3
_THREAD = "coordinator-sentinel"
# In seconds. A handshake includes requests to former clients.
_LONGEST_HANDSHAKE = 30.0

_logger = logging.getLogger("coordinator")


class SentinelVariables:
    """A small variable, the sentinel, on each server. If a sentinel is gone, all variables on its server are gone.

    If TensorFlow does not reach a server during an update of its server definition, TensorFlow treats the server as a
    new one and drops the objects on it, although the same process lives on. Only the loss of a variable shows this.
    TensorFlow may fail to reach a server that answers a probe, if TensorFlow's own connection was shut down: the
    connection is tried again only after a pause. So sentinels are read before an update too.

    Sentinels are identified by the numbers of the connections to their servers. Servers are asked in parallel.
    `longest_call`, in seconds, is longer than the time after which the heartbeat disconnects from a frozen server.
    """

    def __init__(self, longest_call: float) -> None:
        self._longest_call = longest_call
        self._sentinels: dict[int, tf.Variable] = {}
        # The numbers of the connections to the parameter servers, and the function by which a worker calls them.
        self._traced: tuple[tuple[int, ...], Any] | None = None
        self._turns: dict[Task, threading.Lock] = {}

    def place(self, devices: Mapping[int, str]) -> set[int]:
        """Creates missing sentinels, and forgets the sentinels of servers that are no longer connected.

        `devices` has the names of all connected servers, by the numbers of the connections. Returns the numbers of
        connections that were lost before their sentinels existed.
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

        self._sentinels = {number: self._sentinels[number] for number in self._sentinels if number in devices}
        in_parallel(_THREAD, try_create, devices.keys() - self._sentinels.keys())
        return devices.keys() - self._sentinels.keys()

    def are_reachable(self, numbers: Collection[int]) -> bool:
        """Returns True if TensorFlow's connections to all of these servers work now, even if variables are gone."""
        return all(in_parallel(_THREAD, self._is_reachable, numbers).values())

    def gone(self, numbers: Collection[int]) -> set[int]:
        """Returns which of these sentinels are gone, after an update that may have cost servers their variables."""
        return {number for number, exists in in_parallel(_THREAD, self._exists, numbers).items() if not exists}

    def unreached_from(self, workers: Sequence[Task], numbers: Sequence[int]) -> list[Task]:
        """Makes each connected worker call each parameter server; returns the workers without an answer.

        TensorFlow tries a refused connection again only after a pause; until then, every call from that worker to that
        server fails. So the calls are retried for some seconds. `numbers` identify the parameter servers' connections.
        """
        if not workers:
            return []
        traced = self._traced
        if traced is None or traced[0] != tuple(numbers):
            if (concrete := self._trace(_round_trips, numbers)) is None:
                return list(workers)
            self._traced = traced = tuple(numbers), concrete

        def reaches(worker: Task) -> bool:
            # Two simultaneous calls on one worker that both need two servers may wait for each other without end.
            with self._turns.setdefault(worker, threading.Lock()):
                return _succeeds(f"{worker.device}/device:CPU:0", traced[1], self._longest_call)

        reached = in_parallel("coordinator-reach", reaches, workers)
        return [worker for worker in workers if not reached[worker]]

    def reach_each_other(self, numbers: Sequence[int]) -> bool:
        """Makes each of these parameter servers call all others, with retries. Returns True if all answered."""
        concrete = self._trace(lambda each: _all_on_each(each, lambda _: _round_trips(each)), numbers)
        return concrete is not None and _succeeds(None, concrete, self._longest_call)

    def _trace(self, function: Callable[[Sequence[tf.Variable]], Any], numbers: Sequence[int]) -> Any | None:
        sentinels = [self._sentinels[number] for number in numbers if number in self._sentinels]
        if len(sentinels) < len(numbers):
            return None
        try:
            return tf.function(lambda: function(sentinels), autograph=False).get_concrete_function()
        except tf.errors.OpError as error:
            _logger.info("The servers could not be asked whether they reach the parameter servers.")
            _logger.debug("The call that failed:", exc_info=error)
            return None

    def _read(self, number: int) -> bool:
        return bool(call_within(self._longest_call, _THREAD, self._sentinels[number].numpy))

    def _is_reachable(self, number: int) -> bool:
        try:
            self._read(number)
        except (tf.errors.UnavailableError, tf.errors.DeadlineExceededError, TimeoutError):
            return False
        except tf.errors.OpError:
            pass  # The server answered. `gone` checks whether the variable is gone.
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
    """Adds a message to each sentinel's server and back to the function being traced. Returns a scalar, True."""
    sent = tf.timestamp() > 0.0
    return _all_on_each(sentinels, lambda sentinel: tf.logical_and(sentinel.read_value(), sent))


def _all_on_each(sentinels: Sequence[tf.Variable], answer: Callable[[tf.Variable], Any]) -> Any:
    answers = []
    for sentinel in sentinels:
        with tf.device(sentinel.device):
            answers.append(answer(sentinel))
    return tf.reduce_all(answers)


def _succeeds(device: str | None, concrete: Any, seconds: float) -> bool:
    """Returns True if a function runs without error on a device (None: client). Retries for at most `seconds`."""
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


@dataclasses.dataclass(frozen=True)
class WorkerDevices:
    """The computing devices of a worker, its replicas: `count` devices of the `kind` `CPU` or `GPU`.

    A function is traced once for all workers. If workers have several replicas, the function contains the names of the
    devices. So all workers must have the same devices; a worker with other devices takes no part.
    """

    kind: str
    count: int

    @classmethod
    def of(cls, names: Sequence[str]) -> "WorkerDevices":
        """Chooses from the devices of a server, by their full names: the GPUs if there are several, else the CPUs.

        A worker with one GPU is one replica, like a worker without a GPU, and both may be in one cluster: the device of
        a function with one replica is chosen at each call.
        """
        kinds = [tf.DeviceSpec.from_string(name).device_type for name in names]
        gpus = kinds.count("GPU")
        return cls("GPU", gpus) if gpus > 1 else cls("CPU", 1 if gpus else max(1, kinds.count("CPU")))

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the devices, relative to their worker."""
        return tuple(f"/device:{self.kind}:{number}" for number in range(self.count))

    def __str__(self) -> str:
        return f"{self.count} {self.kind} device{'' if self.count == 1 else 's'}"


def calling_device(names: Sequence[str]) -> str:
    """Returns the device of a server on which functions are called, relative to it: the first GPU, otherwise the CPU.

    TensorFlow prefers this device for operations without a device. `names` are all devices of the server, in full.
    """
    has_gpu = any(tf.DeviceSpec.from_string(name).device_type == "GPU" for name in names)
    return "/device:GPU:0" if has_gpu else "/device:CPU:0"


class Handshake:
    """Checks new servers. One thread at a time may call `admit`.

    `refused` has the incarnations of refused servers, with the errors. `devices` is None until a worker has answered.
    """

    def __init__(self, client: Client, options: Options) -> None:
        self._client = client
        self._probe_timeout = options.probe_timeout
        self._is_mismatch_error = options.version_mismatch == "error"
        self.refused: dict[int, VersionMismatchError | DeviceMismatchError] = {}
        self.devices: WorkerDevices | None = None

    def check_devices(self, statuses: Mapping[Task, TaskStatus], addresses: Mapping[Task, str]) -> None:
        """Refuses workers with other devices than the first worker that answered."""
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
        """Makes the handshake with newly connected servers in parallel; returns the connections of admitted servers."""
        succeeded = in_parallel(
            "coordinator-handshakes", lambda task: self._handshake(task, addresses[task], new[task].incarnation), new
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
    """Compares the TensorFlow versions of a connected server and of this program; warns if they differ.

    Raises VersionMismatchError if they differ and `is_error`, UnavailableError if the server is gone.
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
    """Returns the version of the graphs that a server writes; None if its TensorFlow writes them in another way."""
    try:
        # The constants are created on the server too: the first operation on the client would take much longer.
        with tf.device(f"{device}/device:CPU:0"):
            zero, one = (tf.constant(number, tf.int64) for number in (0, 1))
            dataset = tf.raw_ops.RangeDataset(
                start=zero, stop=zero, step=one, output_types=[tf.int64], output_shapes=[[]]
            )
            written = tf.raw_ops.DatasetToGraphV2(input_dataset=dataset).numpy()
    except (tf.errors.NotFoundError, tf.errors.InvalidArgumentError, tf.errors.UnimplementedError):
        return None
    return tf.compat.v1.GraphDef.FromString(written).versions.producer
