"""Runs the user's program in one role, as a child process, and writes the output of `coordinator run`.

    coordinator-program-output  reads what the evaluator prints
    coordinator-program-errors  reads file descriptor 2 of the program, and shows all but TensorFlow's logs
    coordinator-program-copy    with `is_copied`: reads what the program prints, and writes it to the terminal and to
                                its log
    coordinator-program-end     waits for the end of the program

The program has its own session. So the terminal does not send Ctrl-C to the program, which gets each signal only once,
from the command. The program still reads and writes the terminal. Guarantees:

- The program ends when this process ends (`startup/sitecustomize.py`).
- However the program ends, its child processes end too, except child processes with their own session or process group.
- The command writes each of its lines whole and from the left edge, even if the program draws a progress bar on the
  same terminal. At its end the command restores the terminal.
"""

import codecs
import contextlib
import fcntl
import itertools
import os
import pathlib
import pty
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import termios
import threading
import time
import tty
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from io import RawIOBase
from typing import BinaryIO, TextIO

import psutil

from coordinator.background_thread import BackgroundThread, start_once
from coordinator.errors import LaunchError

_CLEAR_LINE = "\r\x1b[K"
_SHOW_CURSOR = "\x1b[?25h"
# How long a program's child processes may take to end after the program, in seconds. In this time Python's
# `resource_tracker` removes shared memory that the program has left.
_CHILDREN_END_TIMEOUT = 1.0
_POLL_INTERVAL = 0.02
# How long to wait for a program's last output after its end, in seconds. Another process may hold the output open.
_LAST_OUTPUT_TIMEOUT = 2.0
_STARTUP = str(pathlib.Path(__file__).with_name("startup"))

# The format of absl, `I0000 00:00:1795426568.932662   27184 port.cc:153] ...`, and TensorFlow's older format with a
# date and a letter. Messages of level F are shown, because the process ends after them.
_LOG_LINE = re.compile(rb"[IWE]\d{4} \d\d:\d\d:\d+\.\d+ +\d+ |\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d+: [IWE] ")
# The beginning of a possible log line. Other text may be a prompt, and is shown immediately.
_MAYBE_LOG_LINE = re.compile(rb"[IWE](\d{0,4}|\d{4} [\d:. ]*)|\d{1,4}|\d{4}-[\d:. -]*[IWE]?")
_WARNING = b"WARNING: All log messages before absl::InitializeLog"
_LONGEST_START = 64
_READ_INTERVAL = 0.1
# The beginning of lines that servers of this library print themselves.
_OWN_LINE = b"coordinator: "


class Console:
    """The output of the command. Lines of the evaluator go to `output`, all other lines to `errors`."""

    def __init__(self, output: TextIO, errors: TextIO):
        self._output = output
        self._errors = errors

    def say(self, text: str) -> None:
        """Writes a line of the command, with the local time before it."""
        _write_line(self._errors, f"{time.strftime('%Y-%m-%d %H:%M:%S')} coordinator: {text}")

    def forward(self, source: str, line: str) -> None:
        """Writes a line of a program, with its source in brackets before it."""
        _write_line(self._output, f"[{source}] {line}")

    def forward_error(self, source: str, line: str) -> None:
        """Writes a line of a server's standard error, with its source in brackets before it."""
        _write_line(self._errors, f"[{source}] {line}")

    def show(self, text: str) -> None:
        """Writes text of a program unchanged."""
        _write(self._errors, text)

    @contextlib.contextmanager
    def restored(self, keyboard: int) -> Iterator[None]:
        """Restores the terminal at the descriptor `keyboard` at the end of the scope, and shows the cursor."""
        settings = termios.tcgetattr(keyboard) if os.isatty(keyboard) else None
        try:
            yield
        finally:
            if settings is not None and _is_in_foreground(keyboard):
                termios.tcsetattr(keyboard, termios.TCSANOW, settings)
            if self._output.isatty():
                _write(self._output, _SHOW_CURSOR)


def _is_in_foreground(keyboard: int) -> bool:
    """Returns True if this process may change the terminal. The kernel stops a background process that tries."""
    try:
        return os.tcgetpgrp(keyboard) == os.getpgrp()
    except OSError:
        # The terminal belongs to another session.
        return False


def _write_line(stream: TextIO, line: str) -> None:
    _write(stream, f"{_CLEAR_LINE if stream.isatty() else ''}{line}\n")


def _write(stream: TextIO, text: str) -> None:
    # The write fails if the reader has ended (`coordinator run ... | head`), the terminal is gone, or the disk is full.
    # The run must still pass on signals and end in order.
    with contextlib.suppress(OSError):
        stream.write(text)
        stream.flush()


class ProgramProcess:
    """A running program. Only the main thread may create it, because the program ends with the thread that started it.

    Args:
      command: the arguments of the interpreter.
      environment: the program's environment.
      on_line: gets each line that the program prints, also to standard error. With None the program uses this process's
        standard input and output.
      on_error_text: without `on_line`, gets the filtered text that code other than Python writes to standard error.
      is_filtered: whether to leave out the logs of TensorFlow's C++ code. With `log_path` they are always left out.
      log_path: a new file for the text that code other than Python writes to standard error.
      is_copied: whether the file also gets all text that the program prints.
      on_end: gets the program's exit code, or minus the signal that killed the program, after its last line.

    Raises LaunchError if the program could not be started.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        *,
        on_line: Callable[[str], None] | None,
        on_error_text: Callable[[str], None],
        is_filtered: bool,
        log_path: pathlib.Path | None,
        is_copied: bool = False,
        on_end: Callable[[int], None],
    ):
        self._readers: list[threading.Thread] = []
        with contextlib.ExitStack() as opened:
            copy_path = log_path if is_copied else None
            output = errors = None
            # The descriptor to which the program's `sys.stderr` writes.
            python_errors = 2
            if on_line is not None:
                read = partial(_read_lines, on_line, is_filtered and log_path is None, copy_path)
                output = errors = python_errors = self._pipe(opened, "output", read)
                if log_path is not None:
                    errors = self._pipe(opened, "errors", partial(_read_lines, on_line, True, log_path))
            else:
                if copy_path is not None:
                    output, python_errors = self._copies(opened, copy_path)
                if is_filtered or log_path is not None:
                    errors = self._pipe(opened, "errors", partial(_read_errors, on_error_text, log_path))
            moved = [] if errors == output else [os.dup(python_errors)]
            for descriptor in moved:
                opened.callback(os.close, descriptor)
            folders = filter(None, [_STARTUP, environment.get("PYTHONPATH")])
            startup = " ".join(map(str, [os.getpid(), *moved]))
            try:
                self._process = subprocess.Popen(
                    [sys.executable, *command],
                    env={**environment, "PYTHONPATH": os.pathsep.join(folders), "COORDINATOR_STARTUP": startup},
                    start_new_session=True,
                    stdin=None if on_line is None else subprocess.DEVNULL,
                    stdout=output,
                    stderr=errors,
                    pass_fds=moved,
                )
            except OSError as error:
                raise LaunchError(f"{shlex.join(command)} could not be started: {error}.") from error
        # Held to signal or to reap the program, because another process group may get the number of a reaped program.
        self._lock = threading.Lock()
        # If the thread fails, the program's end is unknown, and `on_end` reports code 1, so that nobody waits forever.
        self._watcher = start_once("coordinator-program-end", partial(self._watch, on_end), lambda _: on_end(1))

    def send(self, number: signal.Signals) -> None:
        """Sends a signal to the program and its child processes, as a terminal does, unless the program was reaped."""
        with self._lock:
            # `poll` would reap the program.
            if self._process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self._process.pid, number)

    def close(self) -> None:
        """Kills the program and its child processes; returns when they are gone."""
        self.send(signal.SIGKILL)
        self._watcher.join()

    def _pipe(self, opened: contextlib.ExitStack, name: str, read: Callable[[int], None], like: int = -1) -> int:
        """Starts a reader; returns the descriptor to write to, a terminal if the descriptor `like` is a terminal."""
        # The program may draw a progress bar only on a terminal.
        reading, writing = _open_terminal(like) if os.isatty(like) else os.pipe()
        opened.callback(os.close, writing)
        self._readers.append(start_once(f"coordinator-program-{name}", partial(read, reading)))
        return writing

    def _copies(self, opened: contextlib.ExitStack, log_path: pathlib.Path) -> tuple[int, int]:
        """Returns descriptors for standard output and error whose content is also copied to a file."""

        def copy(descriptor: int) -> int:
            return self._pipe(opened, "copy", partial(_copy, descriptor, log_path), like=descriptor)

        output = copy(1)
        return output, output if os.isatty(1) and os.isatty(2) else copy(2)

    def _watch(self, on_end: Callable[[int], None]) -> None:
        # `WNOWAIT` does not reap the program. `waitid` fails if this process was started with SIGCHLD ignored.
        with contextlib.suppress(ChildProcessError):
            os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)
            _wait_ended_without_leader(self._process.pid, _CHILDREN_END_TIMEOUT)
            self.send(signal.SIGKILL)
            _wait_ended_without_leader(self._process.pid, _CHILDREN_END_TIMEOUT)
        with self._lock:
            code = self._process.wait()
        for reader in self._readers:
            reader.join(_LAST_OUTPUT_TIMEOUT)
        on_end(code)


def _wait_ended_without_leader(group: int, timeout: float) -> None:
    """Waits at most `timeout` seconds until no process of a group runs, except the leader, whose id is `group`."""
    deadline = time.monotonic() + timeout
    pause = threading.Event()
    while any(_is_in_group(pid, group) for pid in psutil.pids() if pid != group) and time.monotonic() < deadline:
        pause.wait(_POLL_INTERVAL)


def _is_in_group(pid: int, group: int) -> bool:
    """Returns True for a running process of the group. A zombie does not count, because it may never be reaped."""
    try:
        return os.getpgid(pid) == group and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except (OSError, psutil.Error):
        # The process has ended.
        return False


def _open_terminal(like: int) -> tuple[int, int]:
    """Returns both ends of a raw terminal, as wide as another one."""
    reading, writing = pty.openpty()
    tty.setraw(writing)
    fcntl.ioctl(writing, termios.TIOCSWINSZ, fcntl.ioctl(like, termios.TIOCGWINSZ, bytes(8)))
    return reading, writing


def _log(path: pathlib.Path | None) -> RawIOBase:
    # The file is opened for appending, because other threads append to it, too.
    return open(path or os.devnull, "ab", buffering=0)


def _write_log(log: RawIOBase, data: bytes) -> None:
    # If the disk is full, the pipe is still read, because a program ends when it writes to a pipe without a reader.
    with contextlib.suppress(OSError):
        log.write(data)


def _copy(descriptor: int, log_path: pathlib.Path, pipe: int) -> None:
    with contextlib.ExitStack() as opened:
        stream = opened.enter_context(open(pipe, "rb", buffering=0))
        log = opened.enter_context(_log(log_path))
        output = opened.enter_context(open(descriptor, "wb", closefd=False))
        # Reading from a terminal fails when the program has ended. Writing fails if the command's own reader has ended.
        with contextlib.suppress(OSError):
            while data := stream.read(65_536):
                _write_log(log, data)
                output.write(data)
                output.flush()


def _read_lines(on_line: Callable[[str], None], is_filtered: bool, log_path: pathlib.Path | None, pipe: int) -> None:
    log_filter = LogFilter()
    with open(pipe, "rb") as lines, _log(log_path) as log:
        for line in lines:
            _write_log(log, line)
            if is_filtered and not log_filter.feed(line):
                continue
            on_line(_last_text(line))


def _last_text(line: bytes) -> str:
    """Returns the last text of a line that was redrawn with carriage returns."""
    return line.decode(errors="replace").rstrip("\r\n").rpartition("\r")[2]


def _read_errors(on_text: Callable[[str], None], log_path: pathlib.Path | None, pipe: int) -> None:
    log_filter = LogFilter()
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    with open(pipe, "rb", buffering=0) as stream, _log(log_path) as log:
        while data := stream.read(65_536):
            _write_log(log, data)
            if text := decoder.decode(log_filter.feed(data)):
                on_text(text)
    if text := decoder.decode(log_filter.end(), final=True):
        on_text(text)


class LogFilter:
    """Removes log lines of TensorFlow from a stream of bytes in pieces of any size.

    The beginning of a line is withheld only while the line may be a log line. A prompt or a progress bar of a child
    process is therefore shown immediately.
    """

    def __init__(self) -> None:
        self._start = b""
        self._is_log: bool | None = None

    def feed(self, data: bytes) -> bytes:
        """Takes the next piece; returns the text to show, which includes text that was withheld before."""
        shown = b""
        for piece in data.splitlines(keepends=True):
            is_whole = piece.endswith((b"\n", b"\r"))
            self._start += piece
            if self._is_log is None:
                self._is_log = _is_log(self._start, is_whole=is_whole)
            if self._is_log is not None:
                shown += b"" if self._is_log else self._start
                self._start = b""
            if is_whole:
                self._is_log = None
        return shown

    def end(self) -> bytes:
        """Returns the withheld beginning of the last line, at the end of the stream."""
        return self._start


def _is_log(start: bytes, *, is_whole: bool) -> bool | None:
    """Returns whether a line is a log line, by its beginning; None if that is not known yet."""
    if _LOG_LINE.match(start) or start.startswith(_WARNING):
        return True
    is_possible = _MAYBE_LOG_LINE.fullmatch(start) or _WARNING.startswith(start)
    return None if is_possible and not is_whole and len(start) < _LONGEST_START else False


def create_log_folder(parent: pathlib.Path | None) -> pathlib.Path:
    """Creates a log folder in `parent`, named by local time, and a link `latest`; for None, a temporary folder."""
    try:
        if parent is None:
            return pathlib.Path(tempfile.mkdtemp(prefix="coordinator-logs-"))
        parent.mkdir(parents=True, exist_ok=True)
        name = time.strftime("%Y-%m-%d_%H-%M-%S")
        for number in itertools.count(1):
            folder = parent / (name if number == 1 else f"{name}-{number}")
            with contextlib.suppress(FileExistsError):
                folder.mkdir()
                break
        # The link cannot be made on a file system without links, or if another run makes it at the same time.
        with contextlib.suppress(OSError):
            (parent / "latest").unlink(missing_ok=True)
            (parent / "latest").symlink_to(folder.name)
    except OSError as error:
        raise LaunchError(f"The folder for logs could not be created: {error}. Give another --log-dir.") from error
    return folder


def log_file(folder: pathlib.Path, process: str, restarts: int) -> pathlib.Path:
    """Returns the log of a process after a number of restarts, such as `ps-0.restart-1.log`."""
    return folder / (f"{process}.restart-{restarts}.log" if restarts else f"{process}.log")


class LogFollower:
    """Reads logs of servers while they grow, on a thread.

    `on_line` gets a server's name, and each line that functions printed on that server, for example by `tf.print`. With
    `is_complete`, `on_line` also gets the lines of TensorFlow and of the server itself.
    """

    def __init__(self, on_line: Callable[[str, str], None], *, is_complete: bool):
        self._on_line = on_line
        self._is_complete = is_complete
        # The server's name and its open log, by path.
        self._logs: dict[pathlib.Path, tuple[str, BinaryIO]] = {}
        self._opened = contextlib.ExitStack()
        self._thread = BackgroundThread("coordinator-server-output", self._read, finish=self._opened.close)
        self._thread.start()

    def follow(self, source: str, path: pathlib.Path) -> None:
        """Reads the log of a server from its beginning, unless the log is followed already."""
        if path not in self._logs:
            self._logs[path] = source, self._opened.enter_context(path.open("rb"))

    def close(self) -> None:
        """Reads what was written until now, and ends the thread."""
        self._thread.stop()
        self._thread.wait_stopped()

    def _read(self) -> None:
        is_last = False
        while not is_last:
            is_last = self._thread.stopping.wait(_READ_INTERVAL)
            for source, log in tuple(self._logs.values()):
                while line := log.readline():
                    if not (is_last or line.endswith(b"\n")):
                        # The end of the line is not written yet.
                        log.seek(-len(line), os.SEEK_CUR)
                        break
                    line = line.removesuffix(b"\n")
                    if self._is_complete or (LogFilter().feed(line + b"\n") and not line.startswith(_OWN_LINE)):
                        self._on_line(source, _last_text(line))
