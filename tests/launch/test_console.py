import errno
import io
import os
import re

import pytest

from coordinator.launch.program_process import Console


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


@pytest.mark.parametrize("error", [errno.EPIPE, errno.EIO, errno.ENOSPC])
def test_an_output_that_takes_nothing_does_not_fail(error: int) -> None:
    console = Console(Broken(error), Broken(error))
    console.forward("evaluator", "loss 1")
    console.forward_error("ps 0", "loss 1")
    console.show("hello.")
    console.say("hello.")
