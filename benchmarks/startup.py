"""How long it takes until training may begin: the import, and connecting to a cluster.

    python -m benchmarks.startup [--repeats 5] [--quick] [--json FILE]

`import coordinator` is timed in a fresh interpreter, with the time of `import tensorflow` beside it. Connecting is from
the making of the strategy, and the peer's coordinator, to their being ready; TensorFlow is loaded by then, and the
servers wait. Each time is that of a fresh process; both sides take turns on one cluster; the figures are medians.
"""

import functools
import json
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

from tqdm import tqdm

from benchmarks.alternated import alternated
from benchmarks.client_environment import client_environment
from benchmarks.contest import Found, plain
from benchmarks.contestants.contestant_process import ContestantProcess
from benchmarks.measured_on import machine_line
from benchmarks.piped_process import ROOT
from benchmarks.rounds import ratio
from benchmarks.speed_arguments import SpeedArguments
from coordinator.launch.free_addresses import free_addresses
from coordinator.simulation.aligned_table import aligned
from coordinator.testing import LocalCluster

SIDES = ("ours", "peer")
SIZES = ((2, 1), (8, 4))
_IMPORT = """
import sys, time, json
began = time.perf_counter()
import {module}
seconds = time.perf_counter() - began
print(json.dumps({{"seconds": seconds, "loads_tensorflow": "tensorflow" in sys.modules}}))
"""


def import_seconds(module: str) -> dict[str, Any]:
    """An answer, as of a `ContestantProcess`: how long a fresh interpreter takes to import a module.

    Its figures are `seconds`, and `loads_tensorflow`: whether TensorFlow is loaded by then.
    """
    command = [sys.executable, "-c", _IMPORT.format(module=module)]
    finished = subprocess.run(command, cwd=ROOT, env=client_environment(), capture_output=True, text=True, check=False)
    if finished.returncode:
        return {"error": f"ended with code {finished.returncode}: {finished.stderr.splitlines()[-1:]}"}
    return {"figures": json.loads(finished.stdout.splitlines()[-1])}


def connect_seconds(side: str, cluster: LocalCluster) -> dict[str, Any]:
    """An answer: how long a fresh process of that side takes to connect to a cluster, in `seconds`."""
    spec = cluster.spec
    spec["chief"] = free_addresses(1, besides=[address for job in spec.values() for address in job])
    with (
        tempfile.TemporaryDirectory(prefix="startup-") as folder,
        ContestantProcess("dispatch", side, spec, pathlib.Path(folder) / "log") as process,
    ):
        return {"figures": {"seconds": process.wait_connected()}}


def measure(sizes: Sequence[tuple[int, int]], repeats: int) -> Found:
    """Measures all, and returns the rounds of each row and column.

    Args:
      sizes: of clusters, workers and parameter servers.
      repeats: of each that are counted.

    Raises:
      LaunchError: a server did not start.
      RuntimeError: a side did not connect.
    """
    with tqdm(total=2 * (len(sizes) + 1) * (repeats + 1), file=sys.stderr, unit="start") as progress:

        def tell(name: str) -> None:
            progress.set_description(name)
            progress.update()

        modules = {"ours": "coordinator", "peer": "tensorflow"}
        runners = {side: functools.partial(import_seconds, module) for side, module in modules.items()}
        found = {"import coordinator / tensorflow": alternated(runners, repeats, tell)}
        for workers, ps in sizes:
            with LocalCluster(workers, ps) as cluster:
                runners = {side: functools.partial(connect_seconds, side, cluster) for side in SIDES}
                found[f"connect to {workers} workers, {ps} ps"] = alternated(runners, repeats, tell)
    return found


def table(found: Found) -> str:
    """A row for each kind of start, in seconds."""
    rows = [
        (
            row,
            *(columns[side].text("seconds", ".3f") for side in SIDES),
            ratio(columns["ours"], columns["peer"], "seconds"),
        )
        for row, columns in found.items()
    ]
    return aligned(("seconds", *SIDES, "ours / peer"), rows)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures and prints the table."""
    assert __doc__ is not None
    chosen = SpeedArguments("startup", __doc__.partition("\n")[0], arguments)
    print(f"{machine_line()}, medians of {chosen.repeats}", flush=True)
    found = measure(SIZES[:1] if chosen.is_quick else SIZES, chosen.repeats)
    chosen.write(plain(found))
    print(table(found))


if __name__ == "__main__":
    main()
