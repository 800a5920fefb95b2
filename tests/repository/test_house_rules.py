"""Tests of rules about files and names that no linter checks."""

import ast
import re
from collections.abc import Iterator

import pytest

from tests import ROOT
from tests.repository.parsing import parse

MOST_LINES = 900
LONGEST_TEST_NAME = 80

EMPTY_NOUNS = re.compile(r"(^|_)(utils?|helpers?|common|misc|impl|managers?|handlers?|v[0-9]+)$")
# Written in two parts, so that this file complies with the rule.
UNFINISHED = re.compile("|".join(["TO" + "DO", "FIX" + "ME", "XX" + "X", "HA" + "CK"]))

FOLDERS = ("benchmarks", "coordinator", "examples", "tests")
SOURCES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))


def sleeps(source: str) -> Iterator[int]:
    """Yields the lines that use `time.sleep`, under any name."""
    for node in ast.walk(parse(source)) if "sleep" in source else ():
        if isinstance(node, ast.Attribute) and ast.unparse(node) == "time.sleep":
            yield node.lineno
        if isinstance(node, ast.ImportFrom) and node.module == "time" and "sleep" in {name.name for name in node.names}:
            yield node.lineno


def test_no_file_holds_more_than_one_concept_by_its_length() -> None:
    lengths = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in SOURCES}
    long = {name: length for name, length in lengths.items() if length > MOST_LINES}
    assert not long, f"Split files of over {MOST_LINES} lines."


def test_every_module_is_named_for_what_it_is() -> None:
    names = [name for path in SOURCES for name in (path, path.parent)]
    assert not {str(name) for name in names if EMPTY_NOUNS.search(name.stem)}


def functions(pattern: str) -> list[str]:
    """Returns the functions and methods whose name begins with a pattern, each with its file."""
    definition = re.compile(rf"^ *def ({pattern}\w*)\(", re.MULTILINE)
    return [f"{path}: {name}" for path in SOURCES for name in definition.findall(path.read_text(encoding="utf-8"))]


def test_every_function_is_named_for_what_it_does() -> None:
    # Besides names of http.server.
    assert not functions("_*(?:maybe|do|process)_(?!(?:GET|request)\\b)")


def test_no_test_name_is_too_long_to_read() -> None:
    assert not functions(f"test_\\w{{{LONGEST_TEST_NAME - len('test_') + 1}}}")


@pytest.mark.parametrize("folder", ["coordinator", "tests"])
def test_no_code_sleeps(folder: str) -> None:
    found = [f"{path}:{line}" for path in sorted((ROOT / folder).rglob("*.py")) for line in sleeps(path.read_text())]
    assert not found, "Wait on an event or a condition, with a timeout."


@pytest.mark.parametrize("source", ["import time\ntime.sleep(1)", "from time import sleep", "f = time.sleep"])
def test_every_way_to_sleep_is_detected(source: str) -> None:
    assert list(sleeps(source))


def test_no_unfinished_work_is_marked() -> None:
    written = [*SOURCES, *ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), ROOT / "BUILD", ROOT / "pyproject.toml"]
    found = [
        f"{path}:{number}"
        for path in written
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        if UNFINISHED.search(line)
    ]
    assert not found


def test_every_thread_of_the_library_has_a_guard() -> None:
    starts = re.compile(r"threading\.(?:Thread|Timer)\(|\((?:threading\.)?Thread\):|import Thread\b")
    found = [
        f"{path}: {start}"
        for path in sorted((ROOT / "coordinator").rglob("*.py"))
        for start in starts.findall(path.read_text(encoding="utf-8"))
        if path.name != "background_thread.py"
    ]
    assert not found, "Use coordinator.background_thread: what a thread raises must not end its work in silence."
