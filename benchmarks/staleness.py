"""The update rules compared: speed, accuracy, staleness and idle time, on real servers on this machine.

    python -m benchmarks.staleness [--only rules|idle|modulation] [--quick] [--repeats 3] [--json FILE]

    rules        all rules side by side, with one slow worker
    idle         idle time under bounded delay, with stragglers at random (ps-lite, OSDI'14)
    modulation   very stale gradients, with and without a learning rate divided by staleness (arXiv 1511.05950)

Stragglers pause between pull and push without using the processor. All trainings share one cluster; each has its own
network, rule and counts, and the rules take turns.
"""

import argparse
import dataclasses
import json
import os
import pathlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

from tqdm import tqdm

import coordinator
from benchmarks.speed_arguments import measured_on, positive_integer
from benchmarks.staleness_comparison import Comparison
from benchmarks.staleness_idle_curve import IdleCurve
from benchmarks.staleness_modulation import Modulation
from benchmarks.staleness_rules import PS, WORKERS
from benchmarks.staleness_training import TrainingCluster
from coordinator.testing import LocalCluster

Part = Comparison | IdleCurve | Modulation
PARTS = ("rules", "idle", "modulation")


def chosen_parts(only: Sequence[str] | None, repeats: int, *, is_quick: bool) -> dict[str, Part]:
    """Returns the parts to measure, by name.

    Args:
      only: names of `PARTS`; None or empty for all.
      repeats: the number of trainings of each rule, each with another seed.
      is_quick: one repeat, with fewer and shorter trainings.
    """
    parts: dict[str, Part]
    if is_quick:
        parts = {
            "rules": Comparison(repeats=1, steps=60, seconds=1.5),
            "idle": IdleCurve(delays=(0, 2, 16), repeats=1, steps=100),
            "modulation": Modulation(seeds=(0,), gradients=960),
        }
    else:
        parts = {
            "rules": Comparison(repeats=repeats),
            "idle": IdleCurve(repeats=repeats),
            "modulation": Modulation(seeds=tuple(range(repeats))),
        }
    return {name: part for name, part in parts.items() if not only or name in only}


def measure(parts: dict[str, Part], show: Callable[[str, Any], object] = lambda *_: None) -> dict[str, Any]:
    """Measures all parts on one cluster, and returns the results of each.

    Args:
      parts: the parts, by name.
      show: called with a part's name and its results, as soon as they are known.

    Raises:
      LaunchError: a server did not start.
    """
    total = sum(part.trainings for part in parts.values())
    with (
        tqdm(total=total, file=sys.stderr, unit="training") as progress,
        LocalCluster(WORKERS, PS) as cluster,
        coordinator.ParameterServerStrategy(cluster.resolver) as strategy,
    ):
        shared = TrainingCluster(strategy)

        def note(name: str) -> None:
            progress.set_description(name)
            progress.update()

        found = {}
        for name, part in parts.items():
            found[name] = part.measure(shared, note)
            with progress.external_write_mode():
                show(name, found[name])
        return found


def report(parts: dict[str, Part], found: dict[str, Any]) -> dict[str, Any]:
    """Returns all figures with the machine and versions, in JSON types."""
    return {
        **measured_on(),
        **{
            part: {
                "shown": parts[part].describe(),
                "found": {
                    str(name): [dataclasses.asdict(each) for each in figures] for name, figures in found[part].items()
                },
            }
            for part in found
        },
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures and prints the tables."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.staleness", description=__doc__.partition("\n")[0])
    parser.add_argument("--only", action="append", choices=PARTS, help="may be given several times")
    parser.add_argument("--quick", action="store_true", help="one repeat, shorter trainings: about two minutes")
    parser.add_argument("--repeats", type=positive_integer, default=3, help="of each training")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="write all figures to this file")
    chosen = parser.parse_args(arguments)
    parts = chosen_parts(chosen.only, chosen.repeats, is_quick=chosen.quick)
    print(f"{os.cpu_count()} cpus, load {os.getloadavg()[0]:.1f}, {WORKERS} workers, {PS} parameter servers")

    def show(name: str, found: Any) -> None:
        print(f"\n{parts[name].describe()}\n\n{parts[name].table(found)}", flush=True)

    found = measure(parts, show)
    if chosen.json is not None:
        chosen.json.write_text(json.dumps(report(parts, found), indent=2), encoding="utf-8")


if __name__ == "__main__":
    main()
