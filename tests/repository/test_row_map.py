"""Tests that the table of `tests/README.md` is complete, and agrees with the comments in the tests."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import ROOT
from tests.repository.row_map import README, holders_by_row, rows_without_tests, unknown_rows, with_tests


def test_every_row_of_the_table_has_a_test() -> None:
    assert rows_without_tests(README.read_text(encoding="utf-8")) == []


@pytest.mark.long
def test_every_row_has_a_test_of_the_default_suite() -> None:
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "tests"]
    collected = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines()
    default = {line.partition("[")[0].removeprefix("tests/") for line in collected}
    assert len(default) > 1_000
    assert [row for row, tests in holders_by_row().items() if default.isdisjoint(tests)] == []
    assert [row for row, tests in rows_of_sharded_variables() if default.isdisjoint(tests)] == []


def test_every_row_that_a_test_names_is_in_the_table() -> None:
    assert unknown_rows(README.read_text(encoding="utf-8")) == []


def test_the_table_names_the_tests_of_each_row() -> None:
    readme = README.read_text(encoding="utf-8")
    assert readme == with_tests(readme), "Run `python -m tests.repository.row_map`."


def test_every_file_that_the_readme_names_exists() -> None:
    named = re.findall(r"`([\w/]+(?:\.py|/))`", README.read_text(encoding="utf-8"))
    assert len(named) > 40
    assert not [name for name in named if not (README.parent / name).exists()]


def rows_of_sharded_variables() -> list[tuple[str, list[str]]]:
    """Returns TensorFlow's tests in each row of the table about sharded variables, and the tests here."""
    section = README.read_text(encoding="utf-8").partition("\n## TensorFlow's tests of")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (`\w+Test\..*?) \| .+ \| (.+) \|$", section, re.MULTILINE)
    return [(theirs, re.findall(r"`([\w/.]+::test_\w+)`", ours)) for theirs, ours in rows]


def test_every_test_of_sharded_variables_has_one_here_that_exists() -> None:
    rows = rows_of_sharded_variables()
    theirs = [name for names, _ in rows for name in re.findall(r"`(?:\w+\.)?(test\w+)`", names)]
    assert len(theirs) == len(set(theirs)) == 44
    for names, ours in rows:
        assert ours, names
        for path, _, name in (each.partition("::") for each in ours):
            assert f"def {name}(" in (README.parent / path).read_text(encoding="utf-8"), (path, name)


def test_a_comment_with_several_rows_counts_for_each(tmp_path: Path) -> None:
    source = (
        "# row"
        + """s 901, 902 and 903
def test_a():  # row"""
        + """ 904
    pass
"""
    )
    (tmp_path / "test_a.py").write_text(source, encoding="utf-8")
    assert holders_by_row(tmp_path) == {row: ["test_a.py::test_a"] for row in (901, 902, 903, 904)}
