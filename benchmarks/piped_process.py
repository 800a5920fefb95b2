"""A program of the benchmarks as a child process: commands on its standard input, lines of JSON on its output.

No process is left when it is closed.
"""

import abc
import contextlib
import json
import os
import pathlib
import subprocess
import sys
import threading
from typing import Any, Self

ROOT = pathlib.Path(__file__).resolve().parents[1]
_TAIL_LINES = 15
# With the last one, Python would compile this checkout at each start; an installed library is compiled once.
_UNSET = ("TF_CONFIG", "GRPC_FAIL_FAST", "TF_ENABLE_EAGER_CLIENT_STREAMING_ENQUEUE", "PYTHONDONTWRITEBYTECODE")


def client_environment() -> dict[str, str]:
    """Returns this process's environment without the variables that would favour a side, and without GPUs."""
    inherited = {name: value for name, value in os.environ.items() if name not in _UNSET}
    return {"TF_CPP_MIN_LOG_LEVEL": "2", **inherited, "CUDA_VISIBLE_DEVICES": ""}


class PipedProcess(abc.ABC):
    """A running module. Subclasses handle what it reports.

    Args:
      name: for messages.
      module: the module that runs.
      arguments: its arguments.
      log: the file for its standard error.
    """

    def __init__(self, name: str, module: str, *arguments: str, log: pathlib.Path) -> None:
        self._name = name
        self._log = log
        with log.open("ab") as printed:
            self.process = subprocess.Popen(
                [sys.executable, "-m", module, *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=printed,
                text=True,
                cwd=ROOT,
                env=client_environment(),
            )
        self._reader = threading.Thread(target=self._read, name=f"{name}, reader", daemon=True)
        self._reader.start()

    @abc.abstractmethod
    def _on_message(self, message: dict[str, Any]) -> None:
        """Handles one line of output; called on the reader thread."""

    @abc.abstractmethod
    def _on_end(self, code: int) -> None:
        """Handles the end of the process, with its exit code; called on the reader thread."""

    def send(self, command: str) -> None:
        """Sends one line.

        Raises:
          BrokenPipeError: the process has ended.
        """
        assert self.process.stdin is not None
        print(command, file=self.process.stdin, flush=True)

    def close(self) -> None:
        """Kills the process and waits for its end. May be called twice."""
        self.process.kill()
        self.process.wait()
        self._reader.join()
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            # Closing flushes a command that was not sent.
            with contextlib.suppress(BrokenPipeError):
                stream.close()

    def tail(self) -> str:
        """Returns the last lines of its log."""
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-_TAIL_LINES:])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._name}, process {self.process.pid})"

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._on_message(json.loads(line))
        self._on_end(self.process.wait())
