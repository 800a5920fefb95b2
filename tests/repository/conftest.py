"""Fixtures with the imports of the package, its tests, its benchmarks and its examples, which are read once."""

from collections.abc import Callable

import grimp
import pytest

from tests.repository.build_file import distributions_of, import_graph


@pytest.fixture(scope="session")
def imported() -> Callable[[str], set[str]]:
    """Returns the names of the installed distributions that the modules of a folder import."""
    graph: grimp.ImportGraph = import_graph()
    return lambda folder: {
        name for module in {folder, *graph.find_descendants(folder)} for name in distributions_of(graph, module)
    }
