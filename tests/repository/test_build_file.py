"""BUILD agrees with the sources: a library for each folder of the package, with the deps that its files import."""

from collections import Counter, defaultdict
from collections.abc import Callable

import grimp
import pytest

from tests import ROOT
from tests.repository.build_file import BuildFile, Target
from tests.repository.conftest import shown

BUILD = BuildFile()
LIBRARIES = [target for target in BUILD.of_rule("py_library") if not target.attributes.get("testonly")]

names = pytest.mark.parametrize("target", [pytest.param(target, id=target.name) for target in LIBRARIES])


def module_of(file: str) -> str:
    return file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


LIBRARY_OF_MODULE = {module_of(file): target.name for target in LIBRARIES for file in target.files}


def libraries(graph: grimp.ImportGraph, target: Target) -> dict[str, list[str]]:
    """The other libraries that the files of a target import, each with the imports that show it."""
    found = defaultdict(list)
    for module in map(module_of, target.files):
        for imported in graph.find_modules_directly_imported_by(module) & LIBRARY_OF_MODULE.keys():
            found[LIBRARY_OF_MODULE[imported]].append(shown(graph, module, imported))
    found.pop(target.name, None)
    return found


def test_there_is_a_library_for_each_folder() -> None:
    in_no_folder = {"coordinator", "compat"}
    for target in LIBRARIES:
        folders = {file.split("/")[1] if file.count("/") > 1 else "core" for file in target.files}
        assert folders == {"core" if target.name in in_no_folder else target.name}


def test_every_file_of_the_package_is_in_one_library() -> None:
    files = Counter(file for target in LIBRARIES for file in target.files)
    assert files == Counter(str(path.relative_to(ROOT)) for path in (ROOT / "coordinator").rglob("*.py"))


@names
def test_a_library_depends_on_the_libraries_that_it_imports(graph: grimp.ImportGraph, target: Target) -> None:
    imported = libraries(graph, target)
    assert target.inner_deps == set(imported), "\n".join(lines[0] for lines in imported.values())


@names
def test_a_library_depends_on_the_packages_that_it_imports(
    distributions: Callable[[str], dict[str, str]], target: Target
) -> None:
    imported: dict[str, str] = {}
    for file in target.files:
        # As a pip hub writes names.
        imported |= {name.replace("-", "_").lower(): line for name, line in distributions(module_of(file)).items()}
    assert target.distributions == set(imported), "\n".join(imported.values())


def test_every_test_target_has_the_file_that_it_runs() -> None:
    tests = BUILD.of_rule("py_test")
    assert {target.attributes["main"] for target in tests} == {"tests/pytest_main.py"}
    assert not [target.name for target in tests if target.attributes["main"] not in target.files]


def test_every_test_file_is_in_one_test_target() -> None:
    owners = Counter(name for target in BUILD.of_rule("py_test") for name in target.files - {"tests/pytest_main.py"})
    owners.update(BUILD.targets["test_support"].files)
    assert owners == Counter(str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("*.py"))


def test_test_targets_name_the_libraries_that_they_import(graph: grimp.ImportGraph) -> None:
    missing = [
        f"{target.name}: {lines[0]}"
        for target in [*BUILD.of_rule("py_test"), BUILD.targets["test_support"], BUILD.targets["benchmarks"]]
        for library, lines in libraries(graph, target).items()
        if library not in target.inner_deps
    ]
    assert not missing, "\n".join(missing)


def test_test_targets_have_the_test_modules_that_they_import(graph: grimp.ImportGraph) -> None:
    shared = {module_of(file) for file in BUILD.targets["test_support"].files}
    for target in BUILD.of_rule("py_test"):
        own = {module_of(file) for file in target.files}
        imported = {name for module in own for name in graph.find_modules_directly_imported_by(module)}
        assert {name for name in imported if name.startswith("tests.")} <= own | shared, target.name
