"""How much memory the servers' machines have, so that a table which cannot fit is refused before it fills them.

Linux promises more memory than there is, and kills a process that uses what it was promised.
"""

import collections
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

_GIGABYTE = 1e9


def check_fits(table: str, needed: Sequence[int], devices: Sequence[str]) -> None:
    """Raises ValueError if the memory of servers does not suffice for a table.

    Args:
      table: its name.
      needed: bytes on each server, when the table is full.
      devices: of the servers' CPUs.
    """
    # By machine, as several servers may be on one.
    machines: collections.Counter[bytes] = collections.Counter()
    for size, device in zip(needed, devices, strict=True):
        limit = _number(_first_line(device, "/sys/fs/cgroup/memory.max"))
        if limit is not None and size > limit:
            raise _too_large(table, size, device, limit)
        machine = _first_line(device, "/proc/sys/kernel/random/boot_id") or device.encode()
        machines[machine] += size
        together, memory = machines[machine], _number(_first_line(device, "/proc/meminfo"), factor=1024)
        if memory is not None and together > memory:
            raise _too_large(table, together, f"the machine of {device}", memory)


def _too_large(table: str, size: int, place: str, memory: int) -> ValueError:
    return ValueError(
        f"The table {table!r} does not fit: when it is full, it takes {size / _GIGABYTE:.1f} GB on {place}, which has "
        f"{memory / _GIGABYTE:.1f} GB. Use a smaller capacity or dim, an optimizer with less state, or more parameter "
        "servers."
    )


def _number(line: bytes | None, factor: int = 1) -> int | None:
    """Returns the first number in a line, such as that of "MemTotal: 24 kB"; None if there is none, as in "max"."""
    numbers = [word for word in (line or b"").split() if word.isdigit()]
    return int(numbers[0]) * factor if numbers else None


def _first_line(device: str, path: str) -> bytes | None:
    """Returns the first line of a file of a server's machine, or of this one; None if there is no such file."""
    try:
        if tf.DeviceSpec.from_string(device).job != "ps":
            with open(path, "rb") as file:
                return file.readline()
        with tf.device(device):
            # Reading a file that does not exist, TensorFlow would log an error that looks like one of the training's.
            if not tf.io.matching_files(path).shape[0]:
                return None
            line: bytes = _read(tf.constant(path)).numpy()
    except (OSError, tf.errors.NotFoundError, tf.errors.PermissionDeniedError):
        return None
    return line


@tf.function(autograph=False, input_signature=[tf.TensorSpec([], tf.string)])
def _read(path: Any) -> Any:
    # Not `tf.io.read_file`, which finds files of the kernel empty, as they have no size.
    types = {"output_types": [tf.string], "output_shapes": [[]]}
    none, one = tf.constant(""), tf.constant(1, tf.int64)
    lines = tf.raw_ops.TextLineDataset(filenames=path, compression_type=none, buffer_size=tf.constant(4096, tf.int64))
    first = tf.raw_ops.TakeDataset(input_dataset=lines, count=one, **types)
    return tf.raw_ops.DatasetToSingleElement(dataset=first, **types)[0]
