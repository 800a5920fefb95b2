"""`import coordinator` is light, and every public name is there when it is used."""

import ast
import subprocess
import sys

import pytest

import coordinator
from tests.import_graph import ROOT
from tests.program_runner import ProgramRunner

HEAVY = ("google.protobuf", "grpc", "keras", "numpy", "psutil", "tensorflow")
SECONDS_OF_PROCESSOR = 0.2


def test_importing_the_package_loads_nothing_heavy(run_program: ProgramRunner) -> None:
    source = """
        import sys, coordinator
        coordinator.Options, coordinator.Future, coordinator.WorkerLost, dir(coordinator)
        print([name for name in sys.argv[1:] if name in sys.modules])
    """
    assert run_program(source, *HEAVY).stdout == "[]\n"


def test_importing_the_package_is_quick(run_program: ProgramRunner) -> None:
    """In processor time, which a busy machine does not stretch."""
    source = "import time; start = time.process_time(); import coordinator; print(time.process_time() - start)"
    assert float(run_program(source).stdout) < SECONDS_OF_PROCESSOR


@pytest.mark.parametrize("name", coordinator.__all__)
def test_every_public_name_is_there(name: str) -> None:
    assert getattr(coordinator, name) is not None
    assert name in dir(coordinator)


@pytest.mark.parametrize("name", [name for name in coordinator.__all__ if name[0].isupper()])
def test_a_public_class_has_the_name_that_it_is_known_by(name: str) -> None:
    assert getattr(coordinator, name).__name__ == name


def test_a_misspelt_name_is_an_attribute_error_that_lists_the_names() -> None:
    with pytest.raises(AttributeError, match=r"no attribute 'ParameterServerStrategi'.*ParameterServerStrategy"):
        _ = coordinator.ParameterServerStrategi


def test_type_checkers_see_the_same_names_in_the_same_modules() -> None:
    """The imports for type checkers and the table of lazy names are two lists of one thing."""
    source = (ROOT / "coordinator" / "__init__.py").read_text(encoding="utf-8")
    (branch,) = (node for node in ast.parse(source).body if isinstance(node, ast.If))
    imports = [node for node in branch.body if isinstance(node, ast.ImportFrom)]
    seen = {alias.name: node.module for node in imports for alias in node.names}
    subpackages = dict.fromkeys(coordinator._SUBPACKAGES, "coordinator")
    assert seen == coordinator._MODULE_OF_NAME | subpackages
    assert set(seen) | {"__version__"} == set(coordinator.__all__)


def test_a_type_checker_refuses_a_misspelt_name(tmp_path) -> None:
    program = tmp_path / "program.py"
    program.write_text("import coordinator\ncoordinator.Options(probe_timeout=1.0)\ncoordinator.Optoins()\n")
    command = [sys.executable, "-m", "mypy", f"--cache-dir={tmp_path}", "--follow-imports=silent", str(program)]
    checked = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert "program.py:3: error: Module has no attribute" in checked.stdout, checked.stdout + checked.stderr
    assert "Found 1 error" in checked.stdout
