"""What `docs/updates` says is so: its snippets run, its links lead somewhere, and every rule has a page."""

import re
from pathlib import Path

import pytest

from coordinator import updates
from tests.import_graph import ROOT
from tests.program_runner import COORDINATOR, ProgramRunner

DOCS = ROOT / "docs" / "updates"
PAGES = sorted(path for path in DOCS.glob("*.md") if path.name != "README.md")


def snippets(path: Path) -> list[str]:
    """The blocks of Python on a page."""
    return re.findall(r"```python\n(.*?)```", path.read_text(encoding="utf-8"), re.DOTALL)


@pytest.mark.cluster
@pytest.mark.release
@pytest.mark.timeout(500)
def test_all_snippets_run_in_one_program_between_its_beginning_and_its_end(
    run_program: ProgramRunner, tmp_path: Path
) -> None:
    beginning, rest = snippets(DOCS / "README.md")
    parts = [beginning]
    for page in PAGES:
        parts += [*snippets(page), f"print('{page.stem}:', rule.statistics(), flush=True)\n"]
    (tmp_path / "program.py").write_text("\n".join([*parts, rest]), encoding="utf-8")
    printed = run_program(COORDINATOR, "run", "--workers", 2, "--ps", 1, tmp_path / "program.py", timeout=480).stdout
    shown = re.findall(r"^(\w+): \d+ updates, ", printed, re.MULTILINE)
    assert shown == [page.stem for page in PAGES]
    assert re.search(r"^40 updates, 0 of 40 gradients rejected", printed, re.MULTILINE), printed


def test_every_page_has_a_snippet_a_picture_and_says_what_is_guaranteed_when_and_at_what_cost() -> None:
    assert len(PAGES) == 7
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        assert snippets(page), page
        assert re.search(r"^```\n", text, re.MULTILINE), page
        for promise in ("**Guarantees.**", "**When to use it.**", "**What it costs.**", "## Source"):
            assert promise in text, (page, promise)


def test_every_rule_has_a_page_and_is_in_the_table() -> None:
    rules = {name for name in updates.__all__ if name not in {"RuleStatistics", "Staleness", "UpdateRule", "decisions"}}
    tabled = set(re.findall(r"^\| \[`(\w+)`", (DOCS / "README.md").read_text(encoding="utf-8"), re.MULTILINE))
    assert tabled == rules
    assert rules == {re.search(r"updates\.([A-Z]\w+)\(", page.read_text())[1] for page in PAGES}


def test_every_link_and_every_named_file_is_there() -> None:
    for page in DOCS.glob("*.md"):
        text = page.read_text(encoding="utf-8")
        for target in re.findall(r"\]\(([^)#]+)(?:#[\w-]+)?\)", text):
            assert (page.parent / target).exists(), (page, target)
        for name in re.findall(r"`((?:coordinator|examples|benchmarks|docs)/[\w/.]+)`", text):
            assert (ROOT / name).exists(), (page, name)


def test_the_statistics_that_the_overview_names_exist() -> None:
    (paragraph,) = re.findall(
        r"\*\*Statistics\.\*\*(.*?)\n\n", (DOCS / "README.md").read_text(encoding="utf-8"), re.DOTALL
    )
    fields = {name for kind in (updates.RuleStatistics, updates.Staleness) for name in vars(kind)}
    fields |= {*updates.RuleStatistics.__dataclass_fields__, *updates.Staleness.__dataclass_fields__}
    named = set(re.findall(r"`([a-z]\w*)`", paragraph))
    assert {"updates", "staleness", "idle_shares"} <= named
    assert named <= fields
