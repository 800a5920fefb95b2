"""A program of the benchmarks in a process of its own: orders go in, and a line of JSON comes out for what it tells.

It promises that no process is left when it is closed.
"""

import abc
import contextlib
import json
import pathlib
import subprocess
import sys
import threading
from typing import Any, Self

from benchmarks.client_environment import client_environment

ROOT = pathlib.Path(__file__).resolve().parents[1]
_TAIL_LINES = 15


class PipedProcess(abc.ABC):
    """A running module; who derives from it says what becomes of what it tells.

    Args:
      name: for people.
      module: what runs.
      arguments: its arguments.
      log: the file that takes what it prints besides.
    """

    def __init__(self, name: str, module: str, *arguments: str, log: pathlib.Path) -> None:
        self._name = name
        self._log = log
        with log.open("ab") as printed:
            self._process = subprocess.Popen(
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
    def _take(self, told: dict[str, Any]) -> None:
        """Takes what the process told; called on a thread of its own."""

    @abc.abstractmethod
    def _take_end(self, code: int) -> None:
        """The process has ended, with this exit code; called on the same thread."""

    def send(self, order: str) -> None:
        """Sends one line.

        Raises:
          BrokenPipeError: the process is gone.
        """
        assert self._process.stdin is not None
        print(order, file=self._process.stdin, flush=True)

    def close(self) -> None:
        """Kills the process, and returns when it is gone. Closing twice is fine."""
        self._process.kill()
        self._process.wait()
        self._reader.join()
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            # An order that did not get through is tried once more by closing.
            with contextlib.suppress(BrokenPipeError):
                stream.close()

    def tail(self) -> str:
        """The last lines that it printed besides."""
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-_TAIL_LINES:])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._name}, process {self._process.pid})"

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._take(json.loads(line))
        self._take_end(self._process.wait())
