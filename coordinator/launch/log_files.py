"""The logs of a run: one folder for each, one file for each start of a process; and what is shown of them meanwhile."""

import contextlib
import pathlib
import tempfile
import time
from collections.abc import Callable
from typing import BinaryIO

from coordinator.background_thread import BackgroundThread
from coordinator.errors import LaunchError
from coordinator.launch.program_process import LogFilter

_POLL_INTERVAL = 0.1
# Lines that servers of this library print themselves.
_OWN_LINE = b"coordinator: "


def create_log_folder(parent: pathlib.Path | None) -> pathlib.Path:
    """Creates the folder for the logs of one run.

    Args:
      parent: where it is created, named by the local time; the link `latest` there then leads to it. None creates a
        temporary folder.

    Raises:
      LaunchError: it could not be created.
    """
    try:
        if parent is None:
            return pathlib.Path(tempfile.mkdtemp(prefix="coordinator-logs-"))
        parent.mkdir(parents=True, exist_ok=True)
        folder = _create_folder(parent, time.strftime("%Y-%m-%d_%H-%M-%S"))
        # A file system without links, or another run at the same time.
        with contextlib.suppress(OSError):
            (parent / "latest").unlink(missing_ok=True)
            (parent / "latest").symlink_to(folder.name)
    except OSError as error:
        raise LaunchError(f"The folder for logs could not be created: {error}. Give another --log-dir.") from error
    return folder


def _create_folder(parent: pathlib.Path, name: str) -> pathlib.Path:
    number = 1
    while True:
        folder = parent / (name if number == 1 else f"{name}-{number}")
        try:
            folder.mkdir()
            return folder
        except FileExistsError:
            number += 1


def log_file(folder: pathlib.Path, process: str, restarts: int) -> pathlib.Path:
    """Returns the log of a process after a number of restarts, such as `ps-0.restart-1.log`."""
    return folder / (f"{process}.restart-{restarts}.log" if restarts else f"{process}.log")


class LogFollower:
    """Reads logs of servers while they grow, on a thread.

    Args:
      on_line: gets the name of a server, and a line that functions in it printed, such as those of `tf.print`.
      is_complete: lines that TensorFlow and the server itself wrote are given too.
    """

    def __init__(self, on_line: Callable[[str, str], None], *, is_complete: bool):
        self._on_line = on_line
        self._is_complete = is_complete
        self._logs: dict[pathlib.Path, _FollowedLog] = {}
        self._thread = BackgroundThread("coordinator-server-output", self._read, finish=self._close_logs)
        self._thread.start()

    def follow(self, source: str, path: pathlib.Path) -> None:
        """Reads a log from its beginning, unless it is followed already.

        Args:
          source: the name of the server.
          path: an existing file.
        """
        if path not in self._logs:
            self._logs[path] = _FollowedLog(source, path.open("rb"))

    def close(self) -> None:
        """Reads what was written until now, and ends the thread."""
        self._thread.stop()
        self._thread.wait_stopped()

    def _read(self) -> None:
        is_last = False
        while not is_last:
            is_last = self._thread.stopping.wait(_POLL_INTERVAL)
            for log in tuple(self._logs.values()):
                for line in log.new_lines(is_complete=self._is_complete, is_last=is_last):
                    self._on_line(log.source, line)

    def _close_logs(self) -> None:
        for log in self._logs.values():
            log.file.close()


class _FollowedLog:
    def __init__(self, source: str, file: BinaryIO):
        self.source = source
        self.file = file
        self._start = b""
        self._filter = LogFilter()

    def new_lines(self, *, is_complete: bool, is_last: bool) -> list[str]:
        *lines, self._start = (self._start + self.file.read()).split(b"\n")
        if is_last and self._start:
            lines.append(self._start)
        shown = [line for line in lines if is_complete or self._is_printed(line + b"\n")]
        return [line.decode(errors="replace").rstrip("\r").rpartition("\r")[2] for line in shown]

    def _is_printed(self, line: bytes) -> bool:
        return bool(self._filter.feed(line)) and not line.startswith(_OWN_LINE)
