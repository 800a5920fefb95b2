"""The file BUILD, written from the sources: a library for each folder of the package, a test for each folder of tests.

python -m tests.repository.build_file    writes BUILD

A target depends on what its files import. What no import says stands in the tables of this file: the sizes of tests,
the files that tests read, and the targets that everybody may use.
"""

import ast
import functools
import importlib.metadata
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import grimp

from tests import ROOT
from tests.repository.parsing import parse

_HEAD = """\
# The layers of the package, one library each. Written by `python -m tests.repository.build_file`, which finds what a
# target depends on in the imports of its files. Packages that must be installed are named as in a pip hub "pypi".

load("@rules_python//python:defs.bzl", "py_library", "py_test")

package(default_visibility = ["//visibility:private"])

licenses(["notice"])

exports_files(["LICENSE"])
"""
_PUBLIC = {"coordinator", "simulation", "testing"}
# Folders whose tests need no server; the tests of modules at the root of the package belong to them.
_CORE_TESTS = ("dashboard", "events", "queueing", "workers")
_MEDIUM = {"core", "heartbeat", "simulation"}
# Patterns of files that are no Python.
_READ_BY_TESTS = {
    "benchmarks": ["benchmarks/RESULTS.md"],
    "core": ["docs/events.md"],
    "embeddings": ["docs/**"],
    "examples": ["examples/**"],
    "repository": ["*", ".ci/**", ".github/**", "coordinator/**", "docs/**", "examples/**", "tests/**"],
    "simulation": ["docs/**"],
    "testbed": ["docs/**"],
}

_distributions_of_import = functools.cache(importlib.metadata.packages_distributions)
_STABLE = {"tf-nightly": "tensorflow", "keras-nightly": "keras", "tf-keras-nightly": "tf_keras"}
# Only Python 3.10 needs them.
_BACKPORTS = {"async_timeout", "exceptiongroup"}


def import_graph() -> grimp.ImportGraph:
    """Returns every import in the sources, also imports inside functions and of names that are loaded lazily."""
    packages = ("coordinator", "tests", "benchmarks", "examples")
    graph = grimp.build_graph(*packages, include_external_packages=True, cache_dir=None)
    for stub in (ROOT / "coordinator").glob("**/__init__.pyi"):
        package = ".".join(stub.parent.relative_to(ROOT).parts)
        for node in parse(stub.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ImportFrom):
                graph.add_import(importer=package, imported=f"{package}.{node.module or node.names[0].name}")
    return graph


def distributions_of(graph: grimp.ImportGraph, module: str) -> set[str]:
    """Returns the names of the distributions that a module imports."""
    imported = {name for name in graph.find_modules_directly_imported_by(module) if graph.is_module_squashed(name)}
    found = {_distributions_of_import()[name][0] for name in imported - sys.stdlib_module_names - _BACKPORTS}
    return {_STABLE.get(name.replace("_", "-"), name) for name in found}


def build_file() -> str:
    """Returns the content of BUILD."""
    graph = import_graph()
    libraries = ("core", "compat", *_folders("coordinator"))
    targets = [_head_of_package(graph), *(_library(graph, name) for name in libraries)]
    targets += [_test_support(graph), _benchmarks(graph), _core_test(graph)]
    for folder in (f"tests/{name}" for name in _folders("tests") if name not in _CORE_TESTS):
        modules = graph.find_descendants(folder.replace("/", "."))
        comment = f"What `{folder}` tests on a machine."
        targets.append(_test(graph, folder[6:], comment, [f"{folder}/**/test_*.py"], folder, modules))
    return "\n".join([_HEAD, *targets])


def _folders(parent: str) -> list[str]:
    return sorted(path.parent.name for path in (ROOT / parent).glob("*/__init__.py"))


def _target_of(module: str) -> str | None:
    """Returns the library that has a module; None if the module is in no library that others may depend on."""
    package, _, rest = module.partition(".")
    if package == "coordinator":
        if rest in ("", "__main__", "compat"):
            return rest.strip("_").replace("main", "") or "coordinator"
        folder = rest.partition(".")[0]
        return folder if (ROOT / "coordinator" / folder).is_dir() else "core"
    if package == "tests":
        return None if rest.rpartition(".")[2].startswith("test_") else "test_support"
    return package if package == "benchmarks" else None


def _deps(graph: grimp.ImportGraph, name: str, modules: Iterable[str]) -> list[str]:
    imported = {target for module in modules for target in graph.find_modules_directly_imported_by(module)}
    libraries = {_target_of(module) for module in imported if module in graph.modules} - {None, name}
    hub = {name.replace("-", "_").lower() for module in modules for name in distributions_of(graph, module)}
    return sorted(f":{library}" for library in libraries) + sorted(f"@pypi//{package}" for package in hub)


def _modules(graph: grimp.ImportGraph, target: str) -> set[str]:
    inner = {module for module in graph.modules if not graph.is_module_squashed(module)}
    return {module for module in inner if _target_of(module) == target}


def _shown(rule: str, comment: str, **attributes: str | Sequence[str]) -> str:
    lines = [f"# {comment}", f"{rule}("]
    for key, value in attributes.items():
        if value:
            lines.append(f"    {key} = {value if isinstance(value, str) else _list(value)},")
    return "\n".join([*lines, ")", ""])


def _list(items: Sequence[str], indent: str = "    ") -> str:
    """Returns a list as buildifier formats it: on one line if it has one item."""
    if len(items) == 1:
        return f'["{items[0]}"]'
    return "\n".join(["[", *(f'{indent}    "{item}",' for item in items), f"{indent}]"])


def _glob(patterns: Sequence[str], exclude: Sequence[str] = ()) -> str:
    if not any("*" in pattern for pattern in patterns):
        return _list(patterns)
    if not exclude:
        return f"glob({_list(patterns)})"
    inner = " " * 8
    return f"glob(\n{inner}{_list(patterns, inner)},\n{inner}exclude = {_list(exclude, inner)},\n    )"


def _summary(path: Path) -> str:
    return str(ast.get_docstring(parse(path.read_text(encoding="utf-8")))).partition("\n")[0]


def _head_of_package(graph: grimp.ImportGraph) -> str:
    return _shown(
        "py_library",
        "What users import: the public names, each loaded when it is first used, and `python -m coordinator`.",
        name='"coordinator"',
        srcs=["coordinator/__init__.py", "coordinator/__main__.py"],
        data=["coordinator/__init__.pyi", "coordinator/py.typed"],
        visibility=["//visibility:public"],
        deps=_deps(graph, "coordinator", {"coordinator", "coordinator.__main__"}),
    )


def _library(graph: grimp.ImportGraph, name: str) -> str:
    folder = ROOT / "coordinator" / name
    srcs, data = _glob([f"coordinator/{name}/**/*.py"]), ""
    if name == "core":
        excluded = ["coordinator/__init__.py", "coordinator/__main__.py", "coordinator/compat.py"]
        srcs = _glob(["coordinator/*.py"], exclude=excluded)
        comment = "Errors, options, futures, statistics, and what a runtime must do. No TensorFlow."
    elif name == "compat":
        srcs, comment = '["coordinator/compat.py"]', _summary(ROOT / "coordinator/compat.py")
    else:
        comment = _summary(folder / "__init__.py")
        if (folder / "__init__.pyi").exists():
            data = _list([f"coordinator/{name}/__init__.pyi"])
        if (folder / "page").exists():
            data = _glob([f"coordinator/{name}/page/*"])
    visibility = ["//visibility:public"] if name in _PUBLIC else []
    deps = _deps(graph, name, _modules(graph, name))
    return _shown("py_library", comment, name=f'"{name}"', srcs=srcs, data=data, visibility=visibility, deps=deps)


def _test_support(graph: grimp.ImportGraph) -> str:
    comment = "All modules of the tests that hold no tests: fixtures, the runner of programs, what folders share."
    srcs = _glob(["tests/**/*.py"], exclude=["tests/**/test_*.py"])
    deps = sorted([*_deps(graph, "test_support", _modules(graph, "test_support")), "@pypi//pytest_timeout"])
    attributes = {"name": '"test_support"', "testonly": "True", "srcs": srcs, "data": ["pyproject.toml"], "deps": deps}
    return _shown("py_library", comment, **attributes)


def _benchmarks(graph: grimp.ImportGraph) -> str:
    comment = "Programs that measure. They are no layer: users of the library never import them."
    deps = _deps(graph, "benchmarks", _modules(graph, "benchmarks"))
    srcs = _glob(["benchmarks/**/*.py"])
    return _shown("py_library", comment, name='"benchmarks"', testonly="True", srcs=srcs, deps=deps)


def _core_test(graph: grimp.ImportGraph) -> str:
    modules = {name for name in graph.find_children("tests") if name.rpartition(".")[2].startswith("test_")}
    for folder in _CORE_TESTS:
        modules |= graph.find_descendants(f"tests.{folder}")
    patterns = ["tests/test_*.py", *(f"tests/{folder}/**/test_*.py" for folder in _CORE_TESTS)]
    return _test(graph, "core", "The core against the fake runtime.", patterns, "tests", modules)


def _test(
    graph: grimp.ImportGraph, name: str, comment: str, patterns: list[str], folder: str, modules: set[str]
) -> str:
    deps = _deps(graph, name + "_test", {module for module in modules if _target_of(module) is None})
    return _shown(
        "py_test",
        comment,
        name=f'"{name}_test"',
        size='"medium"' if name in _MEDIUM else '"large"',
        srcs=f'{_glob(patterns)} + ["tests/pytest_main.py"]',
        args=[folder],
        data=_glob(_READ_BY_TESTS[name]) if name in _READ_BY_TESTS else "",
        main='"tests/pytest_main.py"',
        deps=sorted({*deps, ":test_support"}),
    )


if __name__ == "__main__":
    (ROOT / "BUILD").write_text(build_file(), encoding="utf-8")
