"""Tests of the pages in `docs` and `docs/updates`: snippets run, link targets exist, and every rule has a page."""

import re
from pathlib import Path

import pytest

from coordinator import updates
from tests import ROOT
from tests.pages import snippets
from tests.program_runner import COORDINATOR, ProgramRunner

DOCS = ROOT / "docs" / "updates"
PAGES = sorted(path for path in DOCS.glob("*.md") if path.name != "README.md")


@pytest.mark.cluster
@pytest.mark.release
@pytest.mark.timeout(500)
def test_all_snippets_of_a_page_run_as_one_program(run_program: ProgramRunner, tmp_path: Path) -> None:
    beginning, rest = snippets(DOCS / "README.md")
    parts = [beginning]
    for page in PAGES:
        parts += [*snippets(page), f"print('{page.stem}:', rule.statistics(), flush=True)\n"]
    (tmp_path / "program.py").write_text("\n".join([*parts, rest]), encoding="utf-8")
    printed = run_program(COORDINATOR, "run", "--workers", 2, "--ps", 1, tmp_path / "program.py", timeout=480).stdout
    shown = re.findall(r"^(\w+): \d+ updates, ", printed, re.MULTILINE)
    assert shown == [page.stem for page in PAGES]
    assert re.search(r"^40 updates, 0 of 40 gradients rejected", printed, re.MULTILINE), printed


def test_every_rule_page_has_a_snippet_a_diagram_guarantees_and_costs() -> None:
    assert len(PAGES) == 8
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        assert snippets(page), page
        assert re.search(r"^```\n", text, re.MULTILINE), page
        for promise in ("**Guarantees.**", "**When to use it.**", "**What it costs.**", "## Source"):
            assert promise in text, (page, promise)


def test_every_rule_has_a_page_and_is_in_the_table() -> None:
    others = {"RuleStatistics", "Staleness", "UpdateRule", "decisions"}
    rules = {name for name in updates.__all__ if name not in others}
    tabled = set(re.findall(r"^\| \[`(\w+)`", (DOCS / "README.md").read_text(encoding="utf-8"), re.MULTILINE))
    assert tabled == rules
    assert rules == {re.search(r"updates\.([A-Z]\w+)[()]", page.read_text())[1] for page in PAGES}


def test_every_link_and_every_named_file_of_the_pages_exists() -> None:
    for page in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *DOCS.glob("*.md")]:
        text = page.read_text(encoding="utf-8")
        for target, anchor in re.findall(r"\]\(([^)#:]*)(?:#([\w-]+))?\)", text):
            linked = page.parent / target if target else page
            assert linked.exists(), (page, target)
            assert not anchor or anchor in anchors(linked), (page, target, anchor)
        for name in re.findall(r"`((?:coordinator|examples|benchmarks|docs|tests)/[\w/.]+)`", text):
            assert (ROOT / name).exists(), (page, name)


def anchors(page: Path) -> set[str]:
    """Returns the anchors of a page's headings, as GitHub forms them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


def test_every_page_is_in_the_index() -> None:
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    pages = {path.relative_to(ROOT / "docs") for path in [*ROOT.glob("docs/*.md"), *ROOT.glob("docs/*/README.md")]}
    assert not [page for page in pages - {Path("README.md")} if f"({page})" not in index]


def test_the_statistics_that_the_overview_names_exist() -> None:
    (paragraph,) = re.findall(
        r"\*\*Statistics\.\*\*(.*?)\n\n", (DOCS / "README.md").read_text(encoding="utf-8"), re.DOTALL
    )
    fields = {name for kind in (updates.RuleStatistics, updates.Staleness) for name in vars(kind)}
    fields |= {*updates.RuleStatistics.__dataclass_fields__, *updates.Staleness.__dataclass_fields__}
    named = set(re.findall(r"`([a-z]\w*)`", paragraph))
    assert {"updates", "staleness", "idle_shares"} <= named
    assert named <= fields
