"""Tests of programs of `coordinator run` as processes, and of what is shown of their output."""

import errno
import io
import os
import pathlib
import queue
import re
import signal
from collections.abc import Callable
from multiprocessing.shared_memory import SharedMemory

import psutil
import pytest

from coordinator.launch.program_process import Console, LogFilter, ProgramProcess

TIMEOUT = 60.0
ENVIRONMENT = {**os.environ, "TF_CONFIG": '{"task": {"type": "chief", "index": 0}}'}
# A device that every write to fails at, as a full disk.
FULL = pathlib.Path("/dev/full")

LOGS = (
    b"WARNING: All log messages before absl::InitializeLog() is called are written to STDERR\n"
    b"I0000 00:00:1795426568.932662   27184 port.cc:153] oneDNN custom operations are on.\n"
    b"E0000 00:00:1795426568.932662   27184 a/long/path/to/some/file.cc:52] failed call\n"
    b"2026-11-23 09:47:40.123456: W tensorflow/core/framework/op.cc:1] deprecated\n"
)
SHOWN = (
    b"I am not a log\n",
    b"WARNING: something else\n",
    b"F0000 00:00:1795426568.932662   27184 logging.cc:1] fatal\n",
    b"2026-11-23 09:47:40,123 INFO root of the program\n",
    b"\r 10%|#   |\r 20%|##  |\n",
    b"\n",
    "caf\N{LATIN SMALL LETTER E WITH ACUTE}\n".encode(),
    b"E0000 is how it ends",
)


def test_log_lines_of_tensorflow_are_left_out_however_they_are_split() -> None:
    data = LOGS.join([b"", *SHOWN])
    for size in (1, 7, 64, 10_000):
        log_filter = LogFilter()
        shown = b"".join(log_filter.feed(data[start : start + size]) for start in range(0, len(data), size))
        assert shown + log_filter.end() == b"".join(SHOWN), size


def run(
    source: str, *, on_line: Callable[[str], None] | None, log_path: pathlib.Path | None = FULL, is_copied: bool = False
) -> tuple[int, str]:
    """Runs a program; returns its code, and what it wrote to standard error."""
    ended: queue.SimpleQueue[int] = queue.SimpleQueue()
    errors: list[str] = []
    program = ProgramProcess(
        ["-c", source],
        ENVIRONMENT,
        on_line=on_line,
        on_error_text=errors.append,
        is_filtered=True,
        log_path=log_path,
        is_copied=is_copied,
        on_end=ended.put,
    )
    code = ended.get(timeout=TIMEOUT)
    program.close()
    return code, "".join(errors)


def test_a_program_whose_log_cannot_be_written_is_not_disturbed(capfd: pytest.CaptureFixture[str]) -> None:
    # More than a pipe holds.
    source = "import os\nfor _ in range(200): os.write(2, b'x' * 999 + b'\\n'); print('x' * 99, flush=True)"
    lines: list[str] = []
    assert run(source, on_line=lines.append) == (0, "")
    assert sorted(lines) == ["x" * 99] * 200 + ["x" * 999] * 200
    assert run(source, on_line=None) == (0, ("x" * 999 + "\n") * 200)
    assert run(source, on_line=None, is_copied=True) == (0, ("x" * 999 + "\n") * 200)
    assert capfd.readouterr().out == ("x" * 99 + "\n") * 400


def test_what_a_program_has_started_ends_with_it_but_for_sessions_of_their_own() -> None:
    source = """
import os, subprocess
from multiprocessing.shared_memory import SharedMemory
for is_separate in (False, True):
    child = subprocess.Popen(["sleep", "600"], start_new_session=is_separate, stderr=subprocess.DEVNULL)
    os.write(2, b"%d " % child.pid)
os.write(2, SharedMemory(create=True, size=10).name.encode())
os.kill(os.getpid(), 9)
"""
    code, errors = run(source, on_line=None, log_path=None)
    assert code == -signal.SIGKILL
    *pids, name = errors.split()[:3]
    of_program, separate = map(int, pids)
    running = [each.pid for each in psutil.process_iter(["status"]) if each.info["status"] != psutil.STATUS_ZOMBIE]
    left = [pid for pid in (of_program, separate) if pid in running]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert left == [separate]
    # What cleans up after the program had the time for it.
    with pytest.raises(FileNotFoundError):
        SharedMemory(name.partition("/")[0])


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Broken(io.StringIO):
    def __init__(self, error: int):
        super().__init__()
        self._error = error

    def write(self, text: str) -> int:
        raise OSError(self._error, os.strerror(self._error))


def test_on_a_terminal_a_line_replaces_a_progress_bar() -> None:
    output, errors = Terminal(), Terminal()
    console = Console(output, errors)
    console.forward("evaluator", "loss 1")
    console.say("hello.")
    assert output.getvalue() == "\r\x1b[K[evaluator] loss 1\n"
    assert re.fullmatch(r"\r\x1b\[K[0-9-]{10} [0-9:]{8} coordinator: hello.\n", errors.getvalue())


def test_an_output_that_takes_nothing_does_not_fail() -> None:
    for error in (errno.EPIPE, errno.EIO, errno.ENOSPC):
        console = Console(Broken(error), Broken(error))
        console.forward("evaluator", "loss 1")
        console.forward_error("ps 0", "loss 1")
        console.show("hello.")
        console.say("hello.")
