"""How long faults delay training, with this library and with TensorFlow's own coordinator, on this machine.

    python -m benchmarks.recovery [--only FAULT] [--repeats 3] [--deadline 60] [--json FILE]

For each kind of fault it prints the time from the fault to the next useful step, which is a scheduled function that
began after the fault, updated all variables and has a result. The peer is `tf.distribute.ParameterServerStrategy` with
`tf.distribute.coordinator.ClusterCoordinator`. Each trial has a separate client process, on one cluster whose dead
servers are restarted before; the two sides take turns, and the figures are medians. Timeouts and errors are printed
as such.
"""

import argparse
import dataclasses
import json
import os
import pathlib
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

from tqdm import tqdm

from benchmarks.contest import spec_with_client
from benchmarks.recovery_fault import FAULTS, WORKERS, Fault, Trial, mend
from benchmarks.recovery_outcome import Outcome, ratio, summary
from benchmarks.speed_arguments import measured_on, positive_integer
from coordinator.simulation.result import aligned
from coordinator.testing import LocalCluster

SIDES = ("ours", "peer")
# The outcomes of each fault on each side: for each repeat, one for each of the fault's waits.
Outcomes = dict[str, dict[str, list[tuple[Outcome, ...]]]]


def measure(faults: Sequence[Fault], repeats: int, limit: float) -> Outcomes:
    """Injects every fault on both sides, in turns, and returns the outcomes.

    Args:
      faults: the faults, in order.
      repeats: the number of times each is injected on each side.
      limit: the timeout of each wait, in seconds.

    Raises:
      LaunchError: a server did not start.
      RuntimeError: a client did not get ready.
    """
    found: Outcomes = {fault.name: {side: [] for side in SIDES} for fault in faults}
    with (
        tqdm(total=len(faults) * repeats * len(SIDES), file=sys.stderr, unit="trial") as progress,
        LocalCluster(WORKERS, 1) as cluster,
    ):
        for repeat in range(repeats):
            for fault in faults:
                # The order alternates.
                for side in SIDES if repeat % 2 == 0 else reversed(SIDES):
                    progress.set_description(f"{fault.name}, {side}")
                    outcomes = attempt(fault, cluster, side, limit)
                    found[fault.name][side].append(outcomes)
                    progress.write(f"{fault.name}, {side}: {', '.join(map(str, outcomes))}", file=sys.stderr)
                    progress.update()
    return found


def attempt(fault: Fault, cluster: LocalCluster, side: str, limit: float) -> tuple[Outcome, ...]:
    """Injects a fault once into a whole cluster, with a new client."""
    mend(cluster)
    [client_address] = spec_with_client(cluster)["chief"]
    with tempfile.TemporaryDirectory(prefix="recovery-") as folder:
        return fault.inject(Trial(side, cluster, client_address, pathlib.Path(folder), limit))


def table(faults: Sequence[Fault], found: Outcomes, limit: float) -> str:
    """Returns the table of the outcomes, a row for each wait."""
    rows = []
    for fault in faults:
        for position, wait in enumerate(fault.waits):
            ours, peer = ([outcomes[position] for outcomes in found[fault.name][side]] for side in SIDES)
            rows.append((wait, summary(ours, limit), summary(peer, limit), ratio(ours, peer, limit)))
    return aligned(("fault", "ours", "peer", "peer / ours"), rows)


def report(faults: Sequence[Fault], found: Outcomes, limit: float) -> dict[str, Any]:
    """Returns all figures with the machine and versions, in JSON types."""
    return {
        **measured_on(),
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
    """Returns the faults of these names, or all, in the order of `FAULTS`."""
    return tuple(fault for fault in FAULTS if not names or fault.name in names)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures and prints the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.recovery", description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--only", action="append", choices=[fault.name for fault in FAULTS], help="may be given several times"
    )
    parser.add_argument("--repeats", type=positive_integer, default=3, help="of each fault, on each side")
    parser.add_argument("--deadline", type=float, default=60.0, help="the timeout of each wait, in seconds")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="write all figures to this file")
    chosen = parser.parse_args(arguments)
    faults = chosen_faults(chosen.only)
    found = measure(faults, chosen.repeats, chosen.deadline)
    if chosen.json is not None:
        chosen.json.write_text(json.dumps(report(faults, found, chosen.deadline), indent=2), encoding="utf-8")
    print(f"{os.cpu_count()} cpus, {WORKERS} workers, 1 parameter server, medians of {chosen.repeats}")
    print(table(faults, found, chosen.deadline))


if __name__ == "__main__":
    main()
