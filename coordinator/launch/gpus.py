"""Which GPUs of this machine each worker of `coordinator run` sees."""

import pathlib
import re
from collections.abc import Mapping, Sequence

from coordinator.errors import LaunchError

VISIBLE = "CUDA_VISIBLE_DEVICES"
_DEVICES = pathlib.Path("/dev")


def divide_gpus(gpus: Sequence[str], workers: int, gpus_per_worker: int, where: str) -> tuple[list[str], str]:
    """Gives each worker its own GPUs.

    Args:
      gpus: those of a machine.
      workers: how many workers.
      gpus_per_worker: how many GPUs each has.
      where: what has the GPUs, and the verb, for errors.

    Returns:
      `CUDA_VISIBLE_DEVICES` of each worker, and that of the GPUs that are left.

    Raises:
      LaunchError: there are too few.
    """
    needed = workers * gpus_per_worker
    if needed > len(gpus):
        raise LaunchError(
            f"--gpus-per-worker {gpus_per_worker} needs {needed} GPUs for {workers} workers, and {where} {len(gpus)}; "
            f"{VISIBLE} limits them where it is set."
        )
    starts = range(0, workers * gpus_per_worker, gpus_per_worker) if gpus_per_worker else [0] * workers
    return [",".join(gpus[start : start + gpus_per_worker]) for start in starts], ",".join(gpus[needed:])


def visible_gpus(environment: Mapping[str, str]) -> list[str]:
    """Returns the numbers, or names, of the GPUs of this machine, as CUDA takes them.

    Args:
      environment: `CUDA_VISIBLE_DEVICES` there limits them.
    """
    visible = environment.get(VISIBLE)
    if visible is None:
        files = [path.name for path in _DEVICES.glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name)]
        return [str(index) for index in range(len(files))]
    gpus = [gpu.strip() for gpu in visible.split(",")]
    # CUDA ignores what follows an invalid one, such as -1.
    valid = next((index for index, gpu in enumerate(gpus) if not gpu or gpu.startswith("-")), len(gpus))
    return gpus[:valid]
