"""BUILD tells the truth: its targets are the layers, and their deps are what the sources import."""

from collections import Counter

import pytest

from tests.import_graph import ROOT, ImportGraph
from tests.repository.build_file import BuildFile
from tests.test_layers import MAY_IMPORT

LAYERS = list(MAY_IMPORT)


@pytest.fixture(scope="module")
def build() -> BuildFile:
    return BuildFile()


@pytest.fixture(scope="module")
def graph() -> ImportGraph:
    return ImportGraph()


def test_there_is_one_library_for_each_layer(build: BuildFile) -> None:
    libraries = build.of_rule("py_library")
    assert {target.name for target in libraries if not target.attributes.get("testonly")} == set(LAYERS)


@pytest.mark.parametrize("layer", LAYERS)
def test_a_library_has_the_files_of_its_layer(build: BuildFile, graph: ImportGraph, layer: str) -> None:
    files = {str(graph.paths[module].relative_to(ROOT)) for module in graph.layers[layer]}
    assert build.targets[layer].files == files


@pytest.mark.parametrize("layer", LAYERS)
def test_a_library_depends_on_the_layers_that_it_imports(build: BuildFile, graph: ImportGraph, layer: str) -> None:
    imported = graph.layer_edges(layer)
    assert build.targets[layer].inner_deps == set(imported), "\n".join(map(str, imported.values()))


@pytest.mark.parametrize("layer", LAYERS)
def test_a_library_depends_on_the_packages_that_it_imports(build: BuildFile, graph: ImportGraph, layer: str) -> None:
    of_layer = [found for found in reversed(graph.outer) if graph.layer_of(found.importer) == layer]
    # As a pip hub writes names.
    imported = {str(found.distribution).replace("-", "_"): found for found in of_layer}
    assert build.targets[layer].distributions == set(imported), "\n".join(map(str, imported.values()))


def test_every_test_file_is_in_one_test_target(build: BuildFile) -> None:
    owners = Counter(name for target in build.of_rule("py_test") for name in target.files)
    owners.update(build.targets["test_support"].files)
    files = {str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("*.py")}
    assert owners == Counter(files)


def test_test_targets_name_the_layers_that_they_import(build: BuildFile, graph: ImportGraph) -> None:
    missing = []
    for found in ImportGraph(package="tests").imports:
        if not found.is_within("coordinator"):
            continue
        name = found.imported
        while name not in graph.paths:
            name = name.rpartition(".")[0]
        file = str(found.path.relative_to(ROOT))
        (target,) = (target for target in build.targets.values() if file in target.files)
        if graph.layer_of(name) not in target.inner_deps:
            missing.append(f"{target.name}: {found}")
    assert not missing
