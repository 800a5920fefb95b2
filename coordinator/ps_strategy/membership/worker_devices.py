"""The devices of a worker that compute: each is a replica, and all workers of a cluster have the same.

A function is traced once for all workers, with the names of their devices in it, so a worker with others takes no part.
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

        One GPU, too, is one replica: TensorFlow places each operation on it that can be computed there.

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
