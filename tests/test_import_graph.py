"""The import graph sees every way to import, so that the rules about layers cannot be got round."""

from pathlib import Path

import pytest

from tests.import_graph import ImportGraph


@pytest.fixture
def graph(tmp_path: Path) -> ImportGraph:
    """The graph of a small package with a core of two files, a folder and a root."""
    sources = {
        "__init__.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from shop.stall.till import Till\n",
        "price.py": "import shop.goods\n",
        "goods.py": "def label():\n    from shop.price import Price\n",
        "stall/__init__.py": "",
        "stall/till.py": "import grpc\nimport tensorflow as tf\nfrom shop import price\ntf.__internal__.tracking.x()\n",
        "stall/queue.py": "import importlib, os\nimportlib.import_module('google.protobuf')\n",
    }
    for name, source in sources.items():
        path = tmp_path / "shop" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    return ImportGraph(tmp_path, "shop")


def names_of(graph: ImportGraph, importer: str) -> set[str]:
    return {found.imported for found in graph.imports if found.importer == importer}


def test_files_belong_to_the_layer_of_their_folder(graph: ImportGraph) -> None:
    assert graph.layers == {
        "shop": ["shop"],
        "core": ["shop.goods", "shop.price"],
        "stall": ["shop.stall", "shop.stall.queue", "shop.stall.till"],
    }


def test_imports_in_functions_and_for_type_checkers_count(graph: ImportGraph) -> None:
    assert "shop.price" in names_of(graph, "shop.goods")
    assert set(graph.layer_edges("shop")) == {"stall"}


def test_an_import_by_a_string_counts(graph: ImportGraph) -> None:
    assert "google.protobuf" in names_of(graph, "shop.stall.queue")


def test_a_name_reached_through_a_module_counts(graph: ImportGraph) -> None:
    (reached,) = {found for found in graph.imports if found.imported == "tensorflow.__internal__.tracking.x"}
    assert reached.line == 4
    assert reached.is_within("tensorflow.__internal__")
    assert not reached.is_within("tensorflow.__int")


def test_only_what_must_be_installed_is_outer(graph: ImportGraph) -> None:
    assert {found.distribution for found in graph.outer} == {"grpcio", "protobuf", "tensorflow"}


def test_a_circle_of_imports_is_found(graph: ImportGraph) -> None:
    assert set(graph.cycle("core")) == {"shop.goods", "shop.price"}
    assert graph.cycle("stall") == []
