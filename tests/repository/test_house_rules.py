"""Rules about the shape of files and names that no linter checks."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.import_graph import ROOT

MOST_LINES = 350

EMPTY_NOUNS = re.compile(r"(^|_)(utils?|helpers?|common|misc|impl|managers?|handlers?|v[0-9]+)$")
EMPTY_VERBS = re.compile(r"_*(maybe|do|process)_")
# Spelt in two parts, so that this file keeps the rule.
UNFINISHED = re.compile("|".join(["TO" + "DO", "FIX" + "ME", "XX" + "X", "HA" + "CK"]))

FOLDERS = ("benchmarks", "coordinator", "examples", "tests")
SOURCES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def sleeps(tree: ast.Module) -> Iterator[int]:
    """The lines that use `time.sleep`, under whatever name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node) == "time.sleep":
            yield node.lineno
        if isinstance(node, ast.ImportFrom) and node.module == "time" and "sleep" in {name.name for name in node.names}:
            yield node.lineno


def test_no_file_is_too_long_to_read_at_once() -> None:
    long = {str(path): count for path in SOURCES if (count := len(path.read_text().splitlines())) > MOST_LINES}
    assert not long, f"Split by noun what has over {MOST_LINES} lines."


def test_every_module_is_named_for_what_it_is() -> None:
    names = [name for path in SOURCES for name in (path, path.parent)]
    assert not {str(name) for name in names if EMPTY_NOUNS.search(name.stem)}


def test_every_function_is_named_for_what_it_does() -> None:
    empty = [
        f"{path}:{node.lineno}: {node.name}"
        for path in SOURCES
        for node in ast.walk(parse(path))
        if isinstance(node, ast.FunctionDef) and EMPTY_VERBS.match(node.name)
    ]
    assert not empty


@pytest.mark.parametrize("folder", ["coordinator", "tests"])
def test_nothing_waits_by_sleeping(folder: str) -> None:
    found = [f"{path}:{line}" for path in sorted((ROOT / folder).rglob("*.py")) for line in sleeps(parse(path))]
    assert not found, "Wait on an event or a condition, with a timeout."


@pytest.mark.parametrize("source", ["import time\ntime.sleep(1)", "from time import sleep", "f = time.sleep"])
def test_every_way_to_sleep_is_seen(source: str) -> None:
    assert list(sleeps(ast.parse(source)))


def test_nothing_is_left_for_later() -> None:
    written = [*SOURCES, *ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), ROOT / "BUILD", ROOT / "setup.py"]
    found = [
        f"{path}:{number}"
        for path in written
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        if UNFINISHED.search(line)
    ]
    assert not found
