"""Tests that the table of `tests/README.md` is complete, and agrees with the comments in the tests."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import ROOT
from tests.repository.row_map import README, holders_by_row, rows_of, with_tests
from tests.repository.test_promises import PROMISES


def test_every_row_has_a_test_and_the_table_names_it() -> None:
    readme = README.read_text(encoding="utf-8")
    assert rows_of(readme) == holders_by_row().keys()
    assert readme == with_tests(readme), "Run `python -m tests.repository.row_map`."


@pytest.mark.long
def test_every_row_and_every_guarantee_has_a_test_of_the_default_suite() -> None:
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "tests"]
    collected = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines()
    default = {line.partition("[")[0].removeprefix("tests/") for line in collected}
    assert len(default) > 1_000
    assert [row for row, tests in holders_by_row().items() if default.isdisjoint(tests)] == []
    assert [row for row, tests in rows_of_sharded_variables() if default.isdisjoint(tests)] == []
    assert [promise for promise, tests in PROMISES.items() if default.isdisjoint(tests)] == []


def rows_of_sharded_variables() -> list[tuple[str, list[str]]]:
    """Returns TensorFlow's tests in each row of the table about sharded variables, and the tests here."""
    section = README.read_text(encoding="utf-8").partition("\n## TensorFlow's tests of")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (`\w+Test\..*?) \| .+ \| (.+) \|$", section, re.MULTILINE)
    return [(theirs, re.findall(r"`([\w/.]+::test_\w+)`", ours)) for theirs, ours in rows]


def test_every_test_and_every_file_that_a_page_names_exists() -> None:
    assert len(rows_of_sharded_variables()) > 30
    assert all(ours for _, ours in rows_of_sharded_variables())
    named: list[tuple[Path, str]] = []
    for page in [README, *ROOT.glob("docs/**/*.md"), *README.parent.glob("*/**/*.md")]:
        # The map names its files without the folder of tests.
        found = re.findall(r"`(?:tests/)?([\w/]+(?:\.py|/)(?:::test_\w+)?)`", page.read_text(encoding="utf-8"))
        named += [(page, each) for each in found if page == README or f"`tests/{each}" in page.read_text()]
    assert len(named) > 200
    for page, each in named:
        file, _, test = each.partition("::")
        assert (README.parent / file).exists(), (page, each)
        assert not test or f"def {test}(" in (README.parent / file).read_text(encoding="utf-8"), (page, each)
