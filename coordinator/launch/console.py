"""Where `coordinator run` writes, beside a program that may be drawing a progress bar on the same terminal.

It promises that a line of ours is whole and begins at the left edge, and that the terminal is as it was afterwards.
"""

import contextlib
import os
import termios
from collections.abc import Iterator
from typing import TextIO

_CLEAR_LINE = "\r\x1b[K"
_SHOW_CURSOR = "\x1b[?25h"


class Console:
    """The output of the command.

    Args:
      output: takes the lines of the evaluator.
      errors: takes what the command itself has to say.
    """

    def __init__(self, output: TextIO, errors: TextIO):
        self._output = output
        self._errors = errors

    def say(self, text: str) -> None:
        """Writes something that the command has to say."""
        _write_line(self._errors, f"coordinator: {text}")

    def forward(self, source: str, line: str) -> None:
        """Writes one line of a program, with its source in front."""
        _write_line(self._output, f"[{source}] {line}")

    @contextlib.contextmanager
    def restored(self, keyboard: int) -> Iterator[None]:
        """On leaving, gives the terminal back as it was found, with its cursor shown.

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
    """Whether the terminal is this process's to change: one in the background would be stopped for trying."""
    try:
        return os.tcgetpgrp(keyboard) == os.getpgrp()
    except OSError:
        # It controls some other session.
        return False


def _write_line(stream: TextIO, line: str) -> None:
    _write(stream, f"{_CLEAR_LINE if stream.isatty() else ''}{line}\n")


def _write(stream: TextIO, text: str) -> None:
    # Nobody reads any more (`coordinator run ... | head`): the run still has to be brought to its end.
    with contextlib.suppress(BrokenPipeError):
        stream.write(text)
        stream.flush()
