"""A trace of a simulation, in the format of `strategy.trace`, to be laid beside that of a training."""

import itertools
import os

import numpy as np

from coordinator.events.trace_file import TraceFile
from coordinator.simulation.result import Result
from coordinator.simulation.simulated_worker import Activity

_NAMES = {Activity.COMPUTE: "compute", Activity.WAIT: "wait for the rule", Activity.DEAD: "lost"}


def write_trace(result: Result, path: str | os.PathLike[str]) -> None:
    """Writes what the workers whose timelines were recorded did, and the pushes, as long as all timelines are complete.

    Args:
      result: of the simulation.
      path: of the file, which is overwritten.

    Raises:
      OSError: the file cannot be written.
    """
    end = min([result.seconds, *(timeline.known_until for timeline in result.timelines)])
    file = TraceFile(path, f"simulation, {result.setting.rule}", 2)
    file.instant("ps 0", "the trace begins", 0.0)
    for timeline in result.timelines:
        track = f"worker {timeline.worker}"
        file.instant(track, "the trace begins", 0.0)
        for span in timeline.spans:
            if span.start < end:
                file.slice(track, _NAMES[span.activity], span.start, min(span.end, end) - span.start)
    pushes = zip(result.push_times.tolist(), result.push_workers.tolist(), result.staleness.tolist(), strict=True)
    for at, worker, staleness in itertools.takewhile(lambda push: push[0] <= end, pushes):
        file.instant("ps 0", "push", at, {"worker": worker, "staleness": staleness})
    count = max(1, int(np.searchsorted(result.push_times, end)) // 20)
    counts, edges = np.histogram(result.push_times, bins=min(count, 100), range=(0.0, end))
    for number, at, seconds in zip(counts.tolist(), edges[:-1].tolist(), np.diff(edges).tolist(), strict=True):
        file.counter("finished per second", at, {"finished": round(number / seconds, 1)})
    file.close()
