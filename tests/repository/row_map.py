"""The tests of each row of `tests/README.md`, from comments in the tests such as `# row 28` or `# rows 28, 30`.

`python -m tests.repository.row_map` rewrites the last column of the table; `test_row_map.py` fails if it is outdated.
"""

import ast
import functools
import re
from collections import defaultdict
from pathlib import Path

from tests.repository.parsing import parse

TESTS = Path(__file__).resolve().parents[1]
README = TESTS / "README.md"
_COMMENT = re.compile(r"#.*?\brows? (\d+(?:(?:, | and |, and )\d+)*)")
_TABLE_ROW = re.compile(r"^\| (\d+) \| (.*?) \| (.*?) \|$", re.MULTILINE)


@functools.cache
def holders_by_row(folder: Path = TESTS) -> dict[int, list[str]]:
    """Returns the tests below a folder for each row, as `folder/test_file.py::test_name`, in order."""
    found: dict[int, list[str]] = defaultdict(list)
    for path in sorted(folder.rglob("test_*.py")):
        source = path.read_text(encoding="utf-8")
        lines = source.splitlines()
        for node in ast.walk(parse(source)):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                for row in sorted(_rows_of(node, lines)):
                    found[row].append(f"{path.relative_to(folder)}::{node.name}")
    return found


def with_tests(readme: str) -> str:
    """Returns the README with the last column of its table rewritten."""
    found = holders_by_row()

    def line(match: re.Match[str]) -> str:
        return f"| {match[1]} | {match[2]} | {'<br>'.join(f'`{test}`' for test in found.get(int(match[1]), []))} |"

    return _TABLE_ROW.sub(line, readme)


def rows_of(readme: str) -> set[int]:
    """Returns the numbers of the rows of the table."""
    return {int(match[1]) for match in _TABLE_ROW.finditer(readme)}


def _rows_of(node: ast.FunctionDef, lines: list[str]) -> set[int]:
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)]) - 1
    while first > 0 and lines[first - 1].lstrip().startswith("#"):
        first -= 1
    comments = "\n".join(lines[first : node.end_lineno])
    return {int(row) for match in _COMMENT.finditer(comments) for row in re.findall(r"\d+", match[1])}


if __name__ == "__main__":
    README.write_text(with_tests(README.read_text(encoding="utf-8")), encoding="utf-8")
