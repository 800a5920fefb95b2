"""The output of `coordinator run`, beside a program that may be drawing a progress bar on the same terminal.

It promises that a line of the command is whole and begins at the left edge, and that the terminal is restored.
"""

import contextlib
import os
import termios
import time
from collections.abc import Iterator
from typing import TextIO

_CLEAR_LINE = "\r\x1b[K"
_SHOW_CURSOR = "\x1b[?25h"


class Console:
    """The output of the command.

    Args:
      output: takes the lines of the evaluator.
      errors: takes the command's own lines, and what child processes of the program write to standard error.
    """

    def __init__(self, output: TextIO, errors: TextIO):
        self._output = output
        self._errors = errors

    def say(self, text: str) -> None:
        """Writes a line of the command, after the local time."""
        _write_line(self._errors, f"{time.strftime('%Y-%m-%d %H:%M:%S')} coordinator: {text}")

    def forward(self, source: str, line: str) -> None:
        """Writes a line of a program, after its source in brackets."""
        _write_line(self._output, f"[{source}] {line}")

    def forward_error(self, source: str, line: str) -> None:
        """Writes a line of a server, which printed it to its standard error, after its source in brackets."""
        _write_line(self._errors, f"[{source}] {line}")

    def show(self, text: str) -> None:
        """Writes text of a program as it is."""
        _write(self._errors, text)

    @contextlib.contextmanager
    def restored(self, keyboard: int) -> Iterator[None]:
        """Restores the terminal on leaving, with its cursor shown.

        Args:
          keyboard: the file descriptor of standard input.
        """
        found = termios.tcgetattr(keyboard) if os.isatty(keyboard) else None
        try:
            yield
        finally:
            if found is not None and _is_in_foreground(keyboard):
                termios.tcsetattr(keyboard, termios.TCSANOW, found)
            if self._output.isatty():
                _write(self._output, _SHOW_CURSOR)


def _is_in_foreground(keyboard: int) -> bool:
    """Returns True if this process may change the terminal: the kernel stops one in the background that tries."""
    try:
        return os.tcgetpgrp(keyboard) == os.getpgrp()
    except OSError:
        # It controls another session.
        return False


def _write_line(stream: TextIO, line: str) -> None:
    _write(stream, f"{_CLEAR_LINE if stream.isatty() else ''}{line}\n")


def _write(stream: TextIO, text: str) -> None:
    # The reader has ended (`coordinator run ... | head`), the terminal has gone or the disk is full: the run goes on,
    # and still has to pass on signals and to end in order.
    with contextlib.suppress(OSError):
        stream.write(text)
        stream.flush()
