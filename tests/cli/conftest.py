"""Programs of a few lines and servers that start in a moment, for the tests of the commands."""

import os
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.launch.fake_tensorflow import write_fake_tensorflow

Writer = Callable[[str], Path]
Environment = dict[str, str]


@pytest.fixture
def program(tmp_path: Path) -> Writer:
    def write(source: str) -> Path:
        path = tmp_path / "program.py"
        path.write_text(textwrap.dedent(source))
        return path

    return write


@pytest.fixture
def environment(tmp_path: Path) -> Environment:
    fake = write_fake_tensorflow(tmp_path / "fake")
    folders = [fake, os.environ["PYTHONPATH"]]
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    # Tracebacks have colors in a terminal from Python 3.13 on.
    added = {"PYTHONPATH": os.pathsep.join(folders), "TMPDIR": str(temporary), "PYTHON_COLORS": "0"}
    return {**os.environ, **added}
