"""Tests of rules about files and names that no linter checks."""

import ast
import re
from collections.abc import Iterator

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


def test_no_code_sleeps() -> None:
    for source in ("import time\ntime.sleep(1)", "from time import sleep", "f = time.sleep"):
        assert list(sleeps(source)), source
    paths = [path for folder in ("coordinator", "tests") for path in sorted((ROOT / folder).rglob("*.py"))]
    found = [f"{path}:{line}" for path in paths for line in sleeps(path.read_text())]
    assert not found, "Wait on an event or a condition, with a timeout."


CLOCK = re.compile(r"(?:time\.)?(?:monotonic|perf_counter)(?:_ns)?\(\)|time\.time(?:_ns)?\(\)")
# Files that may compare a duration, and why. The list only shrinks.
MAY_COMPARE = {
    "tests/updates/rules/test_delayed.py": "the delay of a push is real time",
    "tests/dashboard/test_browser.py": "",
    "tests/heartbeat/test_heartbeat.py": "",
    "tests/ps_strategy/failure_programs/closing_client.py": "",
    "tests/ps_strategy/failure_programs/connecting_client.py": "",
    "tests/ps_strategy/membership/test_closing.py": "",
}


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
    paths = sorted((ROOT / "tests").rglob("*.py"))
    found = {str(path.relative_to(ROOT)): list(upper_bounds(path.read_text(encoding="utf-8"))) for path in paths}
    found = {name: lines for name, lines in found.items() if lines}
    assert found.keys() <= MAY_COMPARE.keys(), "Wait on an event, or use a virtual clock: a slow machine fails this."


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
