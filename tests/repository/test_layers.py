"""Tests that imports point downwards, as the contracts in pyproject.toml say, and of uses of private names."""

import ast
from collections.abc import Iterator

from tests import ROOT
from tests.repository.parsing import parse

# `tensorflow.core` is not among them: its messages are a format, which outlives the code that reads it.
PRIVATE_NAMES = (
    "keras.src",
    "tensorflow.__internal__",
    "tensorflow.compiler",
    "tensorflow.keras.__internal__",
    "tensorflow.python",
)
FOLDERS_FOR_PRIVATE_NAMES = (
    ROOT / "coordinator/ps_strategy/tensorflow_internals",
    ROOT / "coordinator/ps_strategy/keras/internals",
)


def imported_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Every name that a file imports or reaches through an import, with its line."""
    aliases: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                aliases[alias.asname or alias.name] = alias.name
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                aliases[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                yield node.lineno, f"{node.module}.{alias.name}"
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            yield node.lineno, ast.unparse(node.args[0]).strip("'\"")
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            name, _, rest = ast.unparse(node).partition(".")
            yield node.lineno, f"{aliases.get(name, name)}.{rest}"


def private_names(tree: ast.AST) -> list[tuple[int, str]]:
    """The private names of TensorFlow and Keras that a file uses."""
    prefixes = tuple(f"{name}." for name in PRIVATE_NAMES)
    return [(line, name) for line, name in imported_names(tree) if f"{name}.".startswith(prefixes)]


def test_private_names_of_tensorflow_and_keras_are_used_in_one_place() -> None:
    found = [
        f"{path}:{line}: {name}"
        for path in (ROOT / "coordinator").rglob("*.py")
        if not any(path.is_relative_to(folder) for folder in FOLDERS_FOR_PRIVATE_NAMES)
        for line, name in private_names(parse(path.read_text(encoding="utf-8")))
    ]
    assert not found


def test_every_way_to_use_a_private_name_is_detected() -> None:
    for source in (
        "import tensorflow as tf\ntf.__internal__.tracking.x()",
        "def load():\n    from tensorflow.python.eager import context",
        "import importlib\nimportlib.import_module('keras.src.utils')",
    ):
        assert private_names(parse(source)), source
    assert not private_names(parse("import tensorflow as tf\ntf.function\nimport keras"))
