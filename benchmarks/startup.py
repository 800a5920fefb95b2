"""The time until training can begin: the import, and connecting to a cluster.

    python -m benchmarks.startup [--repeats 5] [--quick] [--json FILE]

`import coordinator` is timed in a fresh interpreter, with the time of `import tensorflow` beside it. Connecting is the
time to create the strategy (and the peer's coordinator), with TensorFlow loaded and the servers running. Each time is
that of a fresh process; both sides take turns on one cluster; the figures are medians.
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
from benchmarks.contest import Found, plain
from benchmarks.contestants.contestant_process import ContestantProcess
from benchmarks.piped_process import ROOT, client_environment
from benchmarks.rounds import ratio
from benchmarks.speed_arguments import SpeedArguments, machine_line
from coordinator.launch.local_servers import free_addresses
from coordinator.simulation.text_report import aligned
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
    """Measures an import in a fresh interpreter, and returns an answer as a `ContestantProcess` does.

    Its figures are `seconds`, and `loads_tensorflow`: True if the import loaded TensorFlow.
    """
    command = [sys.executable, "-c", _IMPORT.format(module=module)]
    finished = subprocess.run(command, cwd=ROOT, env=client_environment(), capture_output=True, text=True, check=False)
    if finished.returncode:
        return {"error": f"ended with code {finished.returncode}: {finished.stderr.splitlines()[-1:]}"}
    return {"figures": json.loads(finished.stdout.splitlines()[-1])}


def connect_seconds(side: str, cluster: LocalCluster) -> dict[str, Any]:
    """Measures how long a fresh process of a side takes to connect, and returns an answer with `seconds`."""
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
      sizes: clusters as numbers of workers and of parameter servers.
      repeats: the number of counted rounds of each.

    Raises:
      LaunchError: a server did not start.
      RuntimeError: a side did not connect.
    """
    with tqdm(total=2 * (len(sizes) + 1) * (repeats + 1), file=sys.stderr, unit="start") as progress:

        def show(name: str) -> None:
            progress.set_description(name)
            progress.update()

        modules = {"ours": "coordinator", "peer": "tensorflow"}
        runners = {side: functools.partial(import_seconds, module) for side, module in modules.items()}
        found = {"import coordinator / tensorflow": alternated(runners, repeats, show)}
        for workers, ps in sizes:
            with LocalCluster(workers, ps) as cluster:
                runners = {side: functools.partial(connect_seconds, side, cluster) for side in SIDES}
                found[f"connect to {workers} workers, {ps} ps"] = alternated(runners, repeats, show)
    return found


def table(found: Found) -> str:
    """Returns a row for each kind of start, in seconds."""
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
