"""The time until training can begin: the import, connecting to a cluster, and the first function.

    python -m benchmarks.startup [--repeats 5] [--quick] [--json FILE]

`import coordinator` is timed in a fresh interpreter, with the time of `import tensorflow` beside it. Connecting is the
time to create the strategy (and the peer's coordinator), with TensorFlow loaded and the servers running. The time
until the first result ends when a worker has added to a variable: TensorFlow's own coordinator connects to a server
when it first uses it, not when it is created. Each time is that of a fresh process; both sides take turns on one
cluster; the figures are medians.
"""

import functools
import json
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

from tqdm import tqdm

from benchmarks.alternated import alternated
from benchmarks.contest import Found, plain, spec_with_client
from benchmarks.contestants.contestant_process import ContestantProcess
from benchmarks.piped_process import ROOT, client_environment
from benchmarks.rounds import Rounds, ratio
from benchmarks.speed_arguments import SpeedArguments, machine_line
from coordinator.simulation.result import aligned
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
    """Measures how long a fresh process of a side takes to connect, and to run its first function.

    Returns:
      An answer: `seconds` until it is connected, and `first_result`, from the same beginning.
    """
    with (
        tempfile.TemporaryDirectory(prefix="startup-") as folder,
        ContestantProcess("first", side, spec_with_client(cluster), pathlib.Path(folder) / "log") as process,
    ):
        connected = process.wait_connected()
        answer = process.run("add", 0.0)
        if "error" in answer:
            return answer
        return {"figures": {"seconds": connected, "first_result": connected + answer["figures"]["seconds"]}}


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
    """Returns a row for each kind of start, in seconds; after one that connects, a row until the first result."""
    rows = []
    for name, columns in found.items():
        rows.append(_row(name, columns, "seconds"))
        if name.startswith("connect"):
            rows.append(_row("  until the first result", columns, "first_result"))
    return aligned(("seconds", *SIDES, "ours / peer"), rows)


def _row(name: str, columns: Mapping[str, Rounds], figure: str) -> tuple[str, ...]:
    ours, peer = (columns[side] for side in SIDES)
    return name, ours.text(figure, ".3f"), peer.text(figure, ".3f"), ratio(ours, peer, figure)


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
