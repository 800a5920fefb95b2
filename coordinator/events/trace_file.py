"""Files in the trace format of Chrome, which the Perfetto UI shows: tracks with slices, instants, flows and counters.

The file is a JSON object with an event in each line, in microseconds since the beginning of the trace.

Promise: it is complete after each `flush`, as viewers demand, so that it can be opened after the program was killed.

Source: "Trace Event Format" (Google, 2016).
"""

import json
import math
import os
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from coordinator.paths import local_path

# The places of jobs in the viewer, from top to bottom; what has no index comes first.
_PLACES = {"client": 1, "checkpoints": 2, "ps": 10_000, "worker": 20_000}
_END = b"\n]}\n"


class TraceFile:
    """A trace that is being written. All times are in seconds since its beginning.

    Args:
      path: of the file, which is overwritten.
      process: the name under which its tracks are shown.
      number: of that process. Traces of different numbers can be joined into one.

    Raises:
      OSError: the file cannot be written.
      ValueError: the path is a URL: the end of the file is changed in place.
    """

    def __init__(self, path: str | os.PathLike[str], process: str, number: int) -> None:
        self._file = open(local_path(path, "A trace"), "wb")  # noqa: SIM115 - closed by `close`
        self._number = number
        self._tracks: dict[str, int] = {}
        # What is not in the file yet. All lines but the first begin with a comma.
        self._lines = ['{"traceEvents": [\n', json.dumps(self._metadata("process_name", {"name": process}))]

    def track(self, name: str) -> int:
        """Returns the number of the track of a task, such as `worker 0` or `client`."""
        if name not in self._tracks:
            job, _, index = name.partition(" ")
            place = _PLACES.get(job, 30_000) + (int(index) if index.isdigit() else 0)
            # The viewer takes a thread that has the number of its process for the main one.
            self._tracks[name] = track = 10 + len(self._tracks)
            self._write(self._metadata("thread_name", {"name": name}, track))
            self._write(self._metadata("thread_sort_index", {"sort_index": place}, track))
        return self._tracks[name]

    def slice(
        self,
        track: str,
        name: str,
        start: float,
        seconds: float,
        details: Mapping[str, Any] = MappingProxyType({}),
        flow: tuple[int, str] | None = None,
    ) -> None:
        """Writes what took some time on a track.

        Args:
          track: the name of the track.
          name: what it was.
          start: when it began.
          seconds: how long it took.
          details: shown when it is selected.
          flow: the number of an arrow that begins here ("out"), ends here ("in") or passes through ("in out").
        """
        event = self._event("X", name, start, self.track(track))
        event["dur"] = round(1e6 * seconds, 3)
        if flow is not None:
            event["bind_id"] = hex(flow[0])
            event |= {f"flow_{way}": True for way in flow[1].split()}
        self._write(event | ({"args": {**details}} if details else {}))

    def instant(self, track: str, name: str, at: float, details: Mapping[str, Any] = MappingProxyType({})) -> None:
        """Writes what happened at a moment on a track."""
        self._write(self._event("i", name, at, self.track(track)) | {"s": "t", "args": {**details}})

    def counter(self, name: str, at: float, values: Mapping[str, float]) -> None:
        """Writes values from a moment on; each is a line in the track of this name. JSON has only finite ones."""
        finite = {line: value for line, value in values.items() if math.isfinite(value)}
        self._write(self._event("C", name, at, 0) | {"args": finite})

    def flush(self) -> None:
        """Writes all that is not in the file yet."""
        self._file.write("".join(self._lines).encode() + _END)
        self._lines.clear()
        self._file.flush()
        # Continues before the end, which the next lines replace.
        self._file.seek(-len(_END), os.SEEK_CUR)

    def close(self) -> None:
        """Completes the file."""
        with self._file:
            self.flush()

    def _event(self, phase: str, name: str, at: float, track: int) -> dict[str, Any]:
        return {"ph": phase, "name": name, "ts": round(1e6 * at, 3), "pid": self._number, "tid": track}

    def _metadata(self, name: str, fields: dict[str, Any], track: int = 0) -> dict[str, Any]:
        return {"ph": "M", "name": name, "pid": self._number, "tid": track, "args": fields}

    def _write(self, event: dict[str, Any]) -> None:
        self._lines.append(f",\n{json.dumps(event)}")
