"""`python -m coordinator.simulation.known_results FOLDER`: measures all results, and draws them into a folder."""

import argparse
import pathlib
from typing import Any

from coordinator.simulation import picture
from coordinator.simulation.known_results.backup_workers import BackupWorkers
from coordinator.simulation.known_results.convergence import Convergence
from coordinator.simulation.known_results.staleness import BoundedDelays, Softsync
from coordinator.simulation.known_results.waiting import Overheads, Stragglers

# By the names of their pictures.
RESULTS: dict[str, Any] = {
    "softsync": Softsync,
    "bounded_delay": BoundedDelays,
    "overheads": Overheads,
    "convergence": Convergence,
    "stragglers": Stragglers,
    "backup_workers": BackupWorkers,
}


def main() -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(description="Reproduces known results about update rules in simulation.")
    parser.add_argument("folder", type=pathlib.Path, help="folder for the pictures")
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    for name, known in RESULTS.items():
        measured = known.measure()
        print(f"{name}: {measured}", flush=True)
        picture.save(measured.draw(), folder / f"{name}.png")


if __name__ == "__main__":
    main()
