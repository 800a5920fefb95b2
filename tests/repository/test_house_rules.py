"""Tests of rules about files, names and imports that no linter checks."""

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


def test_no_file_holds_more_than_one_concept_by_its_length() -> None:
    assert not [path for path in SOURCES if len(path.read_text().splitlines()) > MOST_LINES], "Split these files."


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


def sleeps(source: str) -> bool:
    """Returns whether a source uses `time.sleep`, under any name."""
    nodes = list(ast.walk(parse(source))) if "sleep" in source else []
    imports = [node for node in nodes if isinstance(node, ast.ImportFrom) and node.module == "time"]
    attributes = [node for node in nodes if isinstance(node, ast.Attribute)]
    return "time.sleep" in map(ast.unparse, attributes) or any("sleep" in ast.unparse(node) for node in imports)


def test_no_code_sleeps() -> None:
    assert all(map(sleeps, ("import time\ntime.sleep(1)", "from time import sleep", "f = time.sleep")))
    sources = [path for path in SOURCES if path.relative_to(ROOT).parts[0] in ("coordinator", "tests")]
    assert not [path for path in sources if sleeps(path.read_text())], "Wait on an event or a condition, in time."


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


def test_no_unfinished_work_is_marked() -> None:
    written = [*SOURCES, *ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), ROOT / "BUILD", ROOT / "pyproject.toml"]
    assert not [path for path in written if UNFINISHED.search(path.read_text(encoding="utf-8"))]


def test_every_thread_of_the_library_has_a_guard() -> None:
    starts = re.compile(r"threading\.(?:Thread|Timer)\(|\((?:threading\.)?Thread\):|import Thread\b")
    others = [path for path in (ROOT / "coordinator").rglob("*.py") if path.name != "background_thread.py"]
    assert not [path for path in others if starts.search(path.read_text(encoding="utf-8"))], "Use `background_thread`."


# `tensorflow.core` is not among them: its messages are a format, which outlives the code that reads it.
PRIVATE_NAMES = ("keras.src", "tensorflow.__internal__", "tensorflow.compiler", "tensorflow.python")
FOLDERS_FOR_PRIVATE_NAMES = ("ps_strategy/tensorflow_internals", "ps_strategy/keras/internals")


def root_of(node: ast.AST) -> str:
    """Returns the name at the beginning of `name.attribute...`; "" if something else is there."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def private_names(tree: ast.AST) -> list[str]:
    """Returns the private names of TensorFlow and Keras that a file imports, or reaches through an import."""
    aliases: dict[str, str] = {}
    names: list[str] = []
    nodes = list(ast.walk(tree))
    for node in nodes:
        if isinstance(node, ast.Import | ast.ImportFrom):
            module = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            aliases |= {alias.asname or alias.name: f"{module}{alias.name}" for alias in node.names}
            names += [f"{module}{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Call) and "import_module" in (vars(node.func).get(key) for key in ("attr", "id")):
            names.append(ast.unparse(node.args[0]).strip("'\""))
    for node in nodes:
        if isinstance(node, ast.Attribute) and aliases.get(root_of(node), "").startswith(("tensorflow", "keras")):
            name, _, rest = ast.unparse(node).partition(".")
            names.append(f"{aliases[name]}.{rest}")
    return [name for name in names if f"{name}.".startswith(tuple(f"{private}." for private in PRIVATE_NAMES))]


def test_private_names_of_tensorflow_and_keras_are_used_in_one_place() -> None:
    for source in (
        "import tensorflow as tf\ntf.__internal__.tracking.x()",
        "def load():\n    from tensorflow.python.eager import context",
        "import importlib\nimportlib.import_module('keras.src.utils')",
    ):
        assert private_names(parse(source)), source
    assert not private_names(parse("import tensorflow as tf\ntf.function\nimport keras"))
    package = ROOT / "coordinator"
    found = {
        path: private_names(parse(path.read_text(encoding="utf-8")))
        for path in package.rglob("*.py")
        if not str(path.relative_to(package)).startswith(FOLDERS_FOR_PRIVATE_NAMES)
    }
    assert not {path: names for path, names in found.items() if names}
