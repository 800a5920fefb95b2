"""Tests that `import coordinator` is quick, and that every public name exists when it is used."""

import ast
import inspect
import operator
import types
from pathlib import Path

import pytest

import coordinator
from tests.program_runner import ProgramRunner
from tests.repository.parsing import parse

HEAVY = ("google.protobuf", "grpc", "keras", "numpy", "psutil", "tensorflow")

FOLDERS = ("checkpoints", "data", "embeddings", "evaluation", "simulation", "testing", "updates")
modules = pytest.mark.parametrize(
    "module", [coordinator, *(getattr(coordinator, name) for name in FOLDERS)], ids=operator.attrgetter("__name__")
)


def test_importing_the_package_and_help_of_commands_load_nothing_heavy(run_program: ProgramRunner) -> None:
    source = """
        import sys, coordinator
        coordinator.Options, coordinator.Future, coordinator.WorkerLost, dir(coordinator)
        print([name for name in sys.argv[1:] if name in sys.modules])
        from coordinator.__main__ import main
        for command in ("testbed", "run"):
            try:
                main([command, "--help"])
            except SystemExit:
                pass
        print([name for name in ("numpy", "keras", "tensorflow", "matplotlib", "tqdm") if name in sys.modules])
    """
    first, *_, last = run_program(source, *HEAVY, fresh=True).stdout.splitlines()
    assert first == last == "[]"


@modules
def test_every_public_name_and_method_has_a_docstring(module: types.ModuleType) -> None:
    public = [getattr(module, name) for name in module.__all__]
    missing = [value for value in public if isinstance(value, type | types.FunctionType) and not inspect.getdoc(value)]
    for owner in [value for value in public if isinstance(value, type)]:
        for name, member in vars(owner).items():
            is_member = isinstance(member, types.FunctionType | property | classmethod | staticmethod)
            if is_member and not name.startswith("_") and not inspect.getdoc(getattr(owner, name)):
                missing.append((owner, name))
    assert not missing


def test_a_misspelt_name_is_an_attribute_error_for_which_python_suggests_another() -> None:
    with pytest.raises(AttributeError, match="ParameterServerStrategi") as raised:
        _ = coordinator.ParameterServerStrategi
    assert (raised.value.obj, raised.value.name) == (coordinator, "ParameterServerStrategi")


@modules
def test_every_lazy_name_is_that_of_the_stub_which_type_checkers_read(module: types.ModuleType) -> None:
    stub = parse(Path(module.__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
    imported = {alias.name for node in stub.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assigned = {ast.unparse(target) for node in stub.body for target in getattr(node, "targets", ())}
    assert imported | assigned | {"__version__"} == set(module.__all__) | {"__version__"}
    assert set(module.__all__) <= set(dir(module))
    for name in module.__all__:
        value = getattr(module, name)
        assert value is not None
        assert module is not coordinator or not name[0].isupper() or value.__name__ == name
