"""Tests that promises.yaml has tests for each promise of docs/guarantees.md, and that these tests exist."""

import re

import yaml

from tests import ROOT

PROMISES: dict[str, list[str]] = yaml.safe_load((ROOT / "tests/repository/promises.yaml").read_text(encoding="utf-8"))
# Sections of the page that promise nothing.
LEFT_OUT = ("What is not promised", "Measured")


def promises() -> list[str]:
    """Returns the bullets, the paragraphs and the rows of the tables of the page, as text on one line each."""
    page = (ROOT / "docs/guarantees.md").read_text(encoding="utf-8")
    _, _, page = page.split("\n\n", 2)
    page = re.sub(r"^```.*?^```$", "", page, flags=re.MULTILINE | re.DOTALL)
    page = re.sub(r"^\|(?: What happens |--).*\n", "", page, flags=re.MULTILINE)
    page = re.sub(r"^(\|.*|## .*)$", r"\n\1\n", page, flags=re.MULTILINE)
    found: list[str] = []
    section = ""
    for part in re.split(r"\n\n+|\n(?=- )", page):
        text = " ".join(re.sub(r"\]\([^)]*\)|[*`\[\]|]|^- ", "", part.strip()).split())
        if part.strip().startswith("## "):
            section = text
        elif text and not section.endswith(LEFT_OUT):
            found.append(text)
    return found


def test_each_promise_is_listed_with_its_tests() -> None:
    found = promises()
    assert len(found) > 80
    listed = {text: [begin for begin in PROMISES if text.startswith(begin)] for text in found}
    assert not [text for text, begins in listed.items() if len(begins) != 1], "List these once, by how they begin."
    stale = PROMISES.keys() - {begin for begins in listed.values() for begin in begins}
    assert not stale, "The page does not promise these any more."


def test_each_test_of_a_promise_exists() -> None:
    assert all(PROMISES.values())
    for test in (test for tests in PROMISES.values() for test in tests):
        file, _, name = test.partition("::")
        path = ROOT / "tests" / file
        assert path.exists(), test
        assert f"\ndef {name}(" in path.read_text(encoding="utf-8"), test
