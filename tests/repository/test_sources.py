"""Tests that what `docs/sources.md` names exists: modules, pages with their sections, and tests."""

import re
from collections.abc import Iterator

import pytest

from tests import ROOT

PAGE = ROOT / "docs/sources.md"
# The sources, in the order of the page.
SOURCES = [
    "Single-client parameter server training",
    "Asynchronous SGD in ElasticDL",
    "ps-lite",
    "Asynchronous model average in Bagua",
    "The staleness test-bed",
]


def tables() -> Iterator[tuple[str, list[list[str]]]]:
    """Yields the name of the source and the rows of each table, the header first."""
    for section in PAGE.read_text(encoding="utf-8").split("\n## ")[1:]:
        name = section.partition("\n")[0]
        for table in re.findall(r"(?:^\|.*\n)+", section, re.MULTILINE):
            rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in table.splitlines()]
            yield name, [rows[0], *rows[2:]]


FEATURES = [(source, row) for source, [header, *rows] in tables() if header[0] == "Feature" for row in rows]


def sections_of(page: str) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", (PAGE.parent / page).read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_each_source_has_its_features_and_what_differs_with_the_reason() -> None:
    headers = {source: [header[0] for name, [header, *_] in tables() if name == source] for source in SOURCES}
    assert headers == {source: ["Feature", "The source"] for source in SOURCES}
    for source, [header, *rows] in tables():
        assert rows, source
        assert all(len(row) == len(header) and all(row) for row in rows), source


@pytest.mark.parametrize(("source", "row"), FEATURES, ids=lambda value: value if isinstance(value, str) else value[0])
def test_a_feature_has_a_module_a_page_and_a_test_that_exist(source: str, row: list[str]) -> None:
    _, module, link, test = row
    assert (ROOT / module.strip("`")).exists(), source
    assert module.startswith(("`benchmarks/", "`coordinator/", "`examples/"))
    page, section = re.fullmatch(r"\[[^\]]+\]\(([^#)]+)#?([^)]*)\)", link).groups()  # type: ignore[union-attr]
    assert (PAGE.parent / page).exists()
    assert not section or section in sections_of(page)
    path = ROOT / test.strip("`")
    assert test.startswith("`tests/")
    files = path.rglob("test_*.py") if path.is_dir() else [path]
    assert any("\ndef test_" in file.read_text(encoding="utf-8") for file in files)
