"""What came of an experiment, as files in a folder: all losses, a summary as a table and in words, pictures."""

import csv
import pathlib
from collections.abc import Iterable, Sequence

from coordinator.errors import SettingError
from coordinator.simulation import picture
from coordinator.simulation.aligned_table import aligned
from coordinator.testbed import loss_picture
from coordinator.testbed.cell import worker_count
from coordinator.testbed.experiment import Experiment
from coordinator.testbed.extra import missing
from coordinator.testbed.findings import findings
from coordinator.testbed.loss_curve import WINDOW, Curve
from coordinator.testbed.spikes import HEIGHT

LOSSES, TABLE, SUMMARY = "losses.csv", "summary.csv", "summary.txt"


class Report:
    """The files in a folder. What would keep them from being written is found out when it is made.

    Args:
      experiment: what was tried.
      folder: where they are written; made if it is not there.

    Raises:
      SettingError: the folder cannot be made.
      LaunchError: matplotlib is not installed.
    """

    def __init__(self, experiment: Experiment, folder: pathlib.Path) -> None:
        self._experiment = experiment
        self._folder = folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise SettingError("output", f"cannot be made: {error}") from error
        try:
            picture.new_figure(1, 1)
        except SettingError:
            raise missing("matplotlib") from None

    def write(self, curves: Sequence[Curve]) -> list[str]:
        """Writes all files.

        Args:
          curves: of the cells that were trained, at least one.

        Returns:
          The names of the files.

        Raises:
          SettingError: a picture cannot be written.
          OSError: a table cannot be written.
        """
        self._write_rows(LOSSES, ["mode", "workers", "delay_s", "batch", "loss", "smoothed_loss"], self._losses(curves))
        head = ["mode", "workers", "delay_s", "spikes", "final_loss", "batches_to_target", "mean_staleness", "seconds"]
        self._write_rows(TABLE, head, self._figures(curves))
        (self._folder / SUMMARY).write_text(self.text(curves) + "\n", encoding="utf-8")
        names = [LOSSES, TABLE, SUMMARY]
        for workers in sorted({curve.cell.workers for curve in curves}):
            if shown := loss_picture.shown_with(curves, workers):
                names.append(f"loss_{worker_count(workers).replace(' ', '_')}.png")
                picture.save(loss_picture.draw(shown, workers, self._experiment), self._folder / names[-1])
        return names

    def text(self, curves: Sequence[Curve]) -> str:
        """The summary: what was tried, a table, what its columns mean, and the paper's findings."""
        target = self._experiment.target_loss
        head = ["training", "spikes", "final loss", f"batches to {target:g}", "staleness", "seconds"]
        rows = [
            [
                str(curve.cell),
                str(curve.spikes),
                f"{curve.final_loss:.3f}",
                str(curve.batches_to(target) or "never"),
                f"{curve.mean_staleness:.1f}",
                f"{curve.seconds:.1f}",
            ]
            for curve in curves
        ]
        total = len(self._experiment.cells())
        return "\n".join(
            [
                str(self._experiment),
                *([f"Stopped after {len(curves)} of {total} trainings."] if len(curves) < total else []),
                "",
                aligned(head, rows),
                "",
                f"Losses are smoothed, the mean of {WINDOW} minibatches. Spikes: rises by more than {HEIGHT:g}.",
                "Final loss: the mean of the last tenth of the minibatches.",
                f"Batches: how many were processed when the loss was first below {target:g}.",
                "Staleness: of gradients when they are applied, in updates, the mean.",
                "",
                "The paper's findings:",
                *(str(finding) for finding in findings(curves, target)),
            ]
        )

    def _losses(self, curves: Sequence[Curve]) -> Iterable[list[object]]:
        for curve in curves:
            cell = curve.cell
            for number, (loss, smoothed) in enumerate(zip(curve.losses, curve.smoothed, strict=True), start=1):
                yield [cell.mode, cell.workers, cell.delay, number, f"{loss:.6g}", f"{smoothed:.6g}"]

    def _figures(self, curves: Sequence[Curve]) -> Iterable[list[object]]:
        for curve in curves:
            cell = curve.cell
            reached = curve.batches_to(self._experiment.target_loss)
            figures = [f"{value:.6g}" for value in (curve.mean_staleness, curve.seconds)]
            yield [cell.mode, cell.workers, cell.delay, curve.spikes, f"{curve.final_loss:.6g}", reached, *figures]

    def _write_rows(self, name: str, head: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
        with (self._folder / name).open("w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(head)
            writer.writerows(rows)

    def __repr__(self) -> str:
        return f"<Report in {self._folder}>"
