"""Tests that all files, all imported packages and the command are installed."""

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

import coordinator
from tests import ROOT
from tests.repository.build_file import distributions_of, import_graph


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files that an installation has in `lib`, and the metadata in `coordinator_tf.egg-info`."""
    folder = tmp_path_factory.mktemp("built")
    commands = ["egg_info", f"--egg-base={folder}", "build", f"--build-base={folder}", f"--build-lib={folder / 'lib'}"]
    setup = [sys.executable, "-W", "ignore", "setup.py", "-q", *commands]
    finished = subprocess.run(setup, cwd=ROOT, capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr
    return folder


@pytest.fixture(scope="module")
def requirements(built: Path) -> dict[str, set[str]]:
    """The names of the required distributions, by extra; those that are always required have the extra ''."""
    found: dict[str, set[str]] = {"": set()}
    extra = ""
    for line in (built / "coordinator_tf.egg-info" / "requires.txt").read_text().splitlines():
        if line.startswith("["):
            extra = line.strip("[]")
            found[extra] = set()
        elif line:
            found[extra].add(re.split(r"[^\w.-]", line, maxsplit=1)[0])
    return found


def test_every_source_file_and_the_command_are_installed(built: Path) -> None:
    installed = {path.relative_to(built / "lib") for path in (built / "lib").rglob("*") if path.is_file()}
    sources = {path.relative_to(ROOT) for path in (ROOT / "coordinator").rglob("*") if path.is_file()}
    assert installed == {path for path in sources if path.suffix != ".pyc"}
    description = (built / "coordinator_tf.egg-info" / "PKG-INFO").read_text().splitlines()
    assert f"Version: {coordinator.__version__}" in description
    (line,) = (built / "coordinator_tf.egg-info" / "entry_points.txt").read_text().strip().splitlines()[1:]
    command, module, function = re.split(" = |:", line)
    assert command == "coordinator"
    assert callable(getattr(importlib.import_module(module), function))


def test_what_is_required_is_what_is_imported_and_two_more(
    requirements: dict[str, set[str]],
) -> None:
    graph = import_graph()

    def imported(folder: str) -> set[str]:
        modules = {folder, *graph.find_descendants(folder)}
        return set().union(*(distributions_of(graph, module) for module in modules))

    assert requirements["plots"] == {"matplotlib"}
    assert requirements["data"] == {"pyarrow", "tqdm"}
    assert requirements["testbed"] == {"matplotlib", "scikit-learn", "tqdm"}
    assert requirements[""] | requirements["testbed"] == imported("coordinator") | {"absl-py", "tensorboard"}
    for folder in ("examples", "benchmarks"):
        assert imported(folder) <= requirements[""] | requirements["examples"] | requirements["plots"]
    assert imported("tests") <= set().union(*requirements.values())
