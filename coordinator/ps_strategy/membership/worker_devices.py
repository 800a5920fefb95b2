"""The devices of a worker that compute: where a function is called, and which are replicas.

A function is traced once for all workers. If they have several replicas, the names of these are in it, so all workers
have the same, and a worker with others takes no part.
"""

import dataclasses
from collections.abc import Sequence

import tensorflow as tf


@dataclasses.dataclass(frozen=True)
class WorkerDevices:
    """The devices of a worker that compute.

    Attributes:
      kind: `CPU` or `GPU`.
      count: how many.
    """

    kind: str
    count: int

    @classmethod
    def of(cls, names: Sequence[str]) -> "WorkerDevices":
        """Chooses from the devices of a server: its GPUs if it has several, otherwise its CPUs.

        A worker with one GPU is one replica, as one without any is, and both may be in a cluster: what a function of
        one replica computes on is decided when it is called.

        Args:
          names: such as `/job:worker/replica:0/task:0/device:CPU:0`.
        """
        kinds = [tf.DeviceSpec.from_string(name).device_type for name in names]
        gpus = kinds.count("GPU")
        return cls("GPU", gpus) if gpus > 1 else cls("CPU", 1 if gpus else max(1, kinds.count("CPU")))

    @property
    def names(self) -> tuple[str, ...]:
        """The devices, relative to their worker."""
        return tuple(f"/device:{self.kind}:{number}" for number in range(self.count))

    def __str__(self) -> str:
        return f"{self.count} {self.kind} device{'' if self.count == 1 else 's'}"


def calling_device(names: Sequence[str]) -> str:
    """Returns the device, relative to its server, on which functions are called: the first GPU, or else the CPU.

    TensorFlow computes there what no device was chosen for, as far as it can.

    Args:
      names: of all devices of the server.
    """
    has_gpu = any(tf.DeviceSpec.from_string(name).device_type == "GPU" for name in names)
    return "/device:GPU:0" if has_gpu else "/device:CPU:0"
