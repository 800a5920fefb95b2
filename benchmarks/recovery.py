"""How long faults hold up training, here and with TensorFlow's own coordinator, side by side on this machine.

    python -m benchmarks.recovery [--only FAULT] [--repeats 3] [--deadline 60] [--json FILE]

For each kind of fault it prints the time from the fault to the next useful step, which is a scheduled function that
began after the fault, updated all variables and has a result. The peer is `tf.distribute.ParameterServerStrategy` with
`tf.distribute.coordinator.ClusterCoordinator`. Each trial has a client process of its own, on one cluster that is made
whole before; the two sides take turns, and the figures are medians. What does not come in time, and what raises
instead, is printed as that.
"""

import argparse
import dataclasses
import importlib.metadata
import json
import os
import pathlib
import platform
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

from tqdm import tqdm

import coordinator
from benchmarks.positive_count import positive_count
from benchmarks.recovery_fault import FAULTS, WORKERS, Fault, Trial, mend
from benchmarks.recovery_outcome import Outcome, ratio, summary
from coordinator.launch.free_addresses import free_addresses
from coordinator.simulation.aligned_table import aligned
from coordinator.testing import LocalCluster

SIDES = ("ours", "peer")
# The outcomes of each fault on each side: for each repeat, one for each thing that was waited for.
Outcomes = dict[str, dict[str, list[tuple[Outcome, ...]]]]


def measure(faults: Sequence[Fault], repeats: int, limit: float) -> Outcomes:
    """Makes every fault happen to both sides, in turns, and returns what came of it.

    Args:
      faults: in the order in which they happen.
      repeats: how often each happens to each side.
      limit: how long to wait for each thing, in seconds.

    Raises:
      LaunchError: a server did not start.
      RuntimeError: a client did not get so far that a fault could be injected.
    """
    found: Outcomes = {fault.name: {side: [] for side in SIDES} for fault in faults}
    with (
        tqdm(total=len(faults) * repeats * len(SIDES), file=sys.stderr, unit="trial") as progress,
        LocalCluster(WORKERS, 1) as cluster,
    ):
        for repeat in range(repeats):
            for fault in faults:
                # Neither side is always the first.
                for side in SIDES if repeat % 2 == 0 else reversed(SIDES):
                    progress.set_description(f"{fault.name}, {side}")
                    outcomes = attempt(fault, cluster, side, limit)
                    found[fault.name][side].append(outcomes)
                    progress.write(f"{fault.name}, {side}: {', '.join(map(str, outcomes))}", file=sys.stderr)
                    progress.update()
    return found


def attempt(fault: Fault, cluster: LocalCluster, side: str, limit: float) -> tuple[Outcome, ...]:
    """Makes a fault happen once to a whole cluster, with a client of its own."""
    mend(cluster)
    [client_address] = free_addresses(1, besides=[address for job in cluster.spec.values() for address in job])
    with tempfile.TemporaryDirectory(prefix="recovery-") as folder:
        return fault.inject(Trial(side, cluster, client_address, pathlib.Path(folder), limit))


def table(faults: Sequence[Fault], found: Outcomes, limit: float) -> str:
    """What came of the faults, a row for each thing that was waited for."""
    rows = []
    for fault in faults:
        for position, wait in enumerate(fault.waits):
            ours, peer = ([outcomes[position] for outcomes in found[fault.name][side]] for side in SIDES)
            rows.append((wait, summary(ours, limit), summary(peer, limit), ratio(ours, peer, limit)))
    return aligned(("fault", "ours", "peer", "peer / ours"), rows)


def report(faults: Sequence[Fault], found: Outcomes, limit: float) -> dict[str, Any]:
    """All figures, and what they were measured on, in the types of JSON."""
    return {
        "cpus": os.cpu_count(),
        "machine": platform.platform(),
        "python": platform.python_version(),
        "versions": {
            "coordinator": coordinator.__version__,
            **{name: importlib.metadata.version(name) for name in ("tensorflow", "keras", "grpcio")},
        },
        "deadline": limit,
        "faults": [
            {
                "name": fault.name,
                "waits": list(fault.waits),
                **{
                    side: [
                        [dataclasses.asdict(outcome) for outcome in outcomes] for outcomes in found[fault.name][side]
                    ]
                    for side in SIDES
                },
            }
            for fault in faults
        ],
    }


def chosen_faults(names: Sequence[str] | None) -> tuple[Fault, ...]:
    """The faults of these names, or all of them, in the order of `FAULTS`."""
    return tuple(fault for fault in FAULTS if not names or fault.name in names)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures and prints the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.recovery", description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--only", action="append", choices=[fault.name for fault in FAULTS], help="may be given several times"
    )
    parser.add_argument("--repeats", type=positive_count, default=3, help="of each fault, on each side")
    parser.add_argument("--deadline", type=float, default=60.0, help="how long to wait for each thing, in seconds")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="takes all figures")
    chosen = parser.parse_args(arguments)
    faults = chosen_faults(chosen.only)
    found = measure(faults, chosen.repeats, chosen.deadline)
    if chosen.json is not None:
        chosen.json.write_text(json.dumps(report(faults, found, chosen.deadline), indent=2), encoding="utf-8")
    print(f"{os.cpu_count()} cpus, {WORKERS} workers, 1 parameter server, medians of {chosen.repeats}")
    print(table(faults, found, chosen.deadline))


if __name__ == "__main__":
    main()
