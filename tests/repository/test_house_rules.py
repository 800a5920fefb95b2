"""Tests of rules about files, names and imports that no linter checks."""

import ast
import re
from collections.abc import Iterator

from tests import ROOT
from tests.repository.parsing import parse

MOST_LINES = 900
LONGEST_TEST_NAME = 80
FOLDERS = ("benchmarks", "coordinator", "examples", "tests")
SOURCES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))


def test_no_file_holds_more_than_one_concept_by_its_length() -> None:
    assert not [path for path in SOURCES if len(path.read_text().splitlines()) > MOST_LINES], "Split these files."


def test_no_test_name_is_too_long_to_read() -> None:
    long_name = re.compile(rf"^ *def (test_\w{{{LONGEST_TEST_NAME - len('test_') + 1},}})\(", re.MULTILINE)
    assert not [name for path in SOURCES for name in long_name.findall(path.read_text(encoding="utf-8"))]


CLOCK = re.compile(r"(?:time\.)?(?:monotonic|perf_counter)(?:_ns)?\(\)|time\.time(?:_ns)?\(\)")


def is_difference(node: ast.AST, moments: set[str]) -> bool:
    """Whether a node subtracts moments: calls of a clock, or variables to which one was assigned."""
    if not (isinstance(node, ast.BinOp) and isinstance(node.op, ast.Sub)):
        return False
    inner = [each for each in ast.walk(node) if isinstance(each, ast.Call | ast.Name | ast.Attribute)]
    return any(CLOCK.fullmatch(text) or text in moments for text in map(ast.unparse, inner))


def upper_bounds(source: str) -> Iterator[int]:
    """Yields the lines with a comparison by which real time must be short, such as `monotonic() - begin < 5`."""
    tree = parse(source) if CLOCK.search(source) else ast.Module([], [])
    for function in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)):
        assigned = [node for node in ast.walk(function) if isinstance(node, ast.Assign)]
        moments = {ast.unparse(node.targets[0]) for node in assigned if CLOCK.search(ast.unparse(node.value))}
        durations = {ast.unparse(node.targets[0]) for node in assigned if is_difference(node.value, moments)}
        for node in (node for node in ast.walk(function) if isinstance(node, ast.Compare)):
            sides = [node.left, *node.comparators]
            short = [
                left if isinstance(operator, ast.Lt | ast.LtE) else right
                for left, operator, right in zip(sides, node.ops, sides[1:], strict=False)
                if isinstance(operator, ast.Lt | ast.LtE | ast.Gt | ast.GtE)
            ]
            parts = [part for side in short for part in ast.walk(side)]
            if any(is_difference(part, moments - durations) or ast.unparse(part) in durations for part in parts):
                yield node.lineno


def test_no_test_needs_a_machine_that_is_fast() -> None:
    begin = "def test():\n    begin = time.monotonic()\n    "
    for late in ("assert time.monotonic() - begin < 5", "took = monotonic() - begin\n    assert 1 < took <= 5"):
        assert list(upper_bounds(begin + late)) == [3 + late.count("\n")], late
    for fine in ("assert time.monotonic() - begin > 5", "while time.monotonic() < begin + 5: pass"):
        assert not list(upper_bounds(begin + fine)), fine
    found = {path: list(upper_bounds(path.read_text(encoding="utf-8"))) for path in (ROOT / "tests").rglob("*.py")}
    assert not {path: lines for path, lines in found.items() if lines}, (
        "Wait on an event, or use a virtual clock: a slow machine fails this."
    )


def test_every_thread_of_the_library_has_a_guard() -> None:
    starts = re.compile(r"threading\.(?:Thread|Timer)\(|\((?:threading\.)?Thread\):|import Thread\b")
    others = [path for path in (ROOT / "coordinator").rglob("*.py") if path.name != "background_thread.py"]
    assert not [path for path in others if starts.search(path.read_text(encoding="utf-8"))], "Use `background_thread`."
