"""Fixtures with the imports of the package, its tests, its benchmarks and its examples, which are read once."""

import ast
import functools
import importlib.metadata
import sys
from collections.abc import Callable

import grimp
import pytest

from tests import ROOT

_distributions_of_import = functools.cache(importlib.metadata.packages_distributions)


@pytest.fixture(scope="session")
def graph() -> grimp.ImportGraph:
    """Every import in the sources, those inside functions and those of names that are loaded lazily included."""
    packages = ("coordinator", "tests", "benchmarks", "examples")
    graph = grimp.build_graph(*packages, include_external_packages=True, cache_dir=None)
    for stub in (ROOT / "coordinator").glob("**/__init__.pyi"):
        package = ".".join(stub.parent.relative_to(ROOT).parts)
        for node in ast.parse(stub.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ImportFrom):
                graph.add_import(importer=package, imported=f"{package}.{node.module or node.names[0].name}")
    return graph


@pytest.fixture(scope="session")
def distributions(graph: grimp.ImportGraph) -> Callable[[str], dict[str, str]]:
    """Returns, for a module, the installed distributions that it imports, each with the line that does."""

    def imported_by(module: str) -> dict[str, str]:
        found = {}
        for name in graph.find_modules_directly_imported_by(module):
            if graph.is_module_squashed(name) and name not in sys.stdlib_module_names:
                (distribution,) = set(_distributions_of_import()[name])
                found[distribution] = shown(graph, module, name)
        return found

    return imported_by


def shown(graph: grimp.ImportGraph, importer: str, imported: str) -> str:
    """Returns an import as a failure shows it."""
    details = graph.get_import_details(importer=importer, imported=imported)
    return f"{importer}:{details[0]['line_number']} imports {imported}" if details else f"{importer} imports {imported}"
