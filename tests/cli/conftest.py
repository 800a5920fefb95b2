"""Programs of a few lines and servers that start in a moment, for the tests of the commands."""

import contextlib
import os
import textwrap
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from tests.launch.command_process import CommandProcess
from tests.launch.fake_tensorflow import write_fake_tensorflow

Writer = Callable[[str], Path]
Environment = dict[str, str]
Run = Callable[..., contextlib.AbstractContextManager[CommandProcess]]

# Reports the cluster, then waits for a line; meanwhile it says when a new process serves as a task.
WATCHING = """
    import json, os, select, sys
    from coordinator.heartbeat.probes import TaskProbe
    cluster = json.loads(os.environ["TF_CONFIG"])["cluster"]
    print("cluster", json.dumps(cluster), flush=True)
    seen = set()
    while not select.select([0], [], [], 0.05)[0]:
        for job in ("worker", "ps"):
            for index, address in enumerate(cluster[job]):
                with TaskProbe(address) as probe:
                    status = probe.status(timeout=5)
                if status is not None and status.incarnation not in seen:
                    seen.add(status.incarnation)
                    print(job, index, "answers anew", flush=True)
"""


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


@pytest.fixture
def run(program: Writer, environment: Environment) -> Run:
    """Runs a program by `coordinator run`. When the block ends, nothing that it has started may be left."""

    @contextlib.contextmanager
    def run(source: str, *arguments: object, options: Sequence[object] = (), **added: str) -> Iterator[CommandProcess]:
        task = "run", *options, program(source), *arguments
        with CommandProcess(*task, environment={**environment, **added}) as command:
            yield command
            assert not command.left()

    return run
