"""Tests of the documentation: every block of code runs, here or in the test that a table names; links are right."""

import argparse
import ast
import importlib.util
import json
import re
import shlex
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import yaml

import coordinator
from coordinator.cli.command_line import main
from tests import ROOT
from tests.pages import blocks, snippets, unnamed
from tests.program_runner import COORDINATOR, ProgramRunner
from tests.repository.parsing import parse

FRAGMENTS = (ROOT / "tests/repository/fragments.py").read_text(encoding="utf-8")
PAGES = sorted(str(path.relative_to(ROOT)) for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
RULES = [page for page in PAGES if page.startswith("docs/updates/") and not page.endswith("README.md")]

# Pages whose blocks are one program: the options of `coordinator run` (None: it starts its own servers), and what it
# prints last.
PROGRAMS = {
    "docs/devices.md": (None, "100 updates"),
    "docs/elastic.md": (None, "2 workers"),
    "docs/keras/fit.md": ([], "Epoch 2/2"),
    "docs/keras/models.md": ([], "done"),
    "docs/migrating_estimator.md": (["--evaluator"], "[evaluator] step 300: "),
    "docs/migrating_mirrored.md": ([], "Epoch 2/2"),
    "docs/recovery.md": ([], "trained for 1000 steps"),
    "docs/tutorial.md": (None, "480 steps"),
}
# Pages whose blocks are fragments.
FRAGMENTED = ["checkpoints", "dashboard", "data", "data_service", "dispatch", "evaluation", "events", "guarantees"]
FRAGMENTED = [f"docs/{name}.md" for name in (*FRAGMENTED, "kubernetes", "slurm", "trace")]
# Pages whose Python is run by other tests, or by a test of their own below.
ELSEWHERE = {
    "README.md": "tests/repository/test_readme.py",
    **dict.fromkeys(
        (f"docs/{name}.md" for name in ("embeddings", "serving", "sparse_updates", "tables")),
        "tests/embeddings/test_page.py",
    ),
    "docs/simulation.md": "tests/simulation/test_docs.py",
    **dict.fromkeys(["docs/keras/exactness.md", "docs/migrating.md"], "tests/repository/test_pages.py"),
    **dict.fromkeys(["docs/updates/README.md", *RULES], "tests/repository/test_pages.py"),
}


def run(
    run_program: ProgramRunner, folder: Path, source: str, options: Sequence[str] = (), files: Sequence[Path] = ()
) -> str:
    (folder / "program.py").write_text(source, encoding="utf-8")
    command = ["run", "--workers", 2, "--ps", 2, *options, folder / "program.py", *files]
    return run_program(COORDINATOR, *command, timeout=480).stdout


def runs_servers(test: Callable[..., None]) -> Callable[..., None]:
    return pytest.mark.cluster(pytest.mark.release(pytest.mark.timeout(500)(test)))


@runs_servers
@pytest.mark.parametrize("page", PROGRAMS)
def test_the_blocks_of_a_page_run_as_one_program(run_program: ProgramRunner, tmp_path: Path, page: str) -> None:
    # The last one of the tutorial is of another program.
    parts = snippets(page)[:-1] if page == "docs/tutorial.md" else snippets(page)
    options, last = PROGRAMS[page]
    source = "\n".join([*parts, *(["strategy.close()"] if "keras" in page else [])])
    printed = (
        run_program(source, timeout=480).stdout if options is None else run(run_program, tmp_path, source, options)
    )
    assert last in printed, printed


@runs_servers
@pytest.mark.parametrize("page", FRAGMENTED)
def test_the_fragments_of_a_page_run(run_program: ProgramRunner, tmp_path: Path, page: str) -> None:
    folder = tmp_path / Path(page).stem
    folder.mkdir()
    files = [folder / f"block_{number}.py" for number, _ in enumerate(snippets(page))]
    for file, text in zip(files, snippets(page), strict=True):
        is_body = re.search("^return ", text, re.MULTILINE)
        whole = "def dataset_fn(context):\n" + textwrap.indent(text, "    ") if is_body else text
        file.write_text(whole.replace('"/checkpoints', f'"{tmp_path}'), encoding="utf-8")
    assert f"ran {len(files)} blocks\n" in run(run_program, tmp_path, FRAGMENTS, files=files)


@runs_servers
def test_the_snippets_about_update_rules_run_as_one_program(run_program: ProgramRunner, tmp_path: Path) -> None:
    beginning, rest = snippets("docs/updates/README.md")
    parts = [beginning]
    for page in RULES:
        parts += [*snippets(page), f"print('{page}:', rule.statistics(), flush=True)\n"]
    printed = run(run_program, tmp_path, "\n".join([*parts, rest]))
    assert re.findall(r"^(\S+): \d+ updates, ", printed, re.MULTILINE) == RULES
    assert re.search(r"^40 updates, 0 of 40 gradients rejected", printed, re.MULTILINE), printed


@runs_servers
def test_the_programs_for_those_who_migrate_run(run_program: ProgramRunner, tmp_path: Path) -> None:
    for name, source in zip(("compat", "own names"), snippets("docs/migrating.md"), strict=False):
        printed = run(run_program, tmp_path, source)
        assert re.search(rf"^{name}: 50 steps, last loss [\d.]+", printed, re.MULTILINE), printed


@pytest.mark.long
def test_the_accumulation_that_a_page_recommends_is_exact(
    strategy: coordinator.ParameterServerStrategy, tmp_path: Path
) -> None:
    [snippet] = snippets("docs/keras/exactness.md")
    # A file, because the source of a function is read when it is traced.
    (tmp_path / "snippet.py").write_text(snippet, encoding="utf-8")
    spec = importlib.util.spec_from_file_location("snippet", tmp_path / "snippet.py")
    module = importlib.util.module_from_spec(spec)
    vars(module)["strategy"] = strategy
    spec.loader.exec_module(module)
    statistics = module.rule.statistics()
    assert int(module.optimizer.iterations) == statistics.updates > 0
    assert statistics.pushes - statistics.rejected >= 4 * statistics.updates


def test_every_block_is_of_a_language_that_is_tested_and_can_be_read() -> None:
    for page in PAGES:
        for block in blocks(page):
            if block.language == "python":
                parse(block.text, page)
            elif block.language == "json":
                assert all(isinstance(json.loads(line), dict) for line in block.text.splitlines()), page
            elif block.language == "yaml":
                assert list(yaml.safe_load_all(block.text)), page
            else:
                assert block.language == "sh", page
        assert not [text for text in unnamed(page) if is_python(text)], f"Write ```python in {page}."
    with_python = {page for page in PAGES if snippets(page)}
    assert with_python == {*PROGRAMS, *FRAGMENTED, *ELSEWHERE}, "Name the test of its blocks above."


def is_python(text: str) -> bool:
    """Whether a text is Python and has a name in it, unlike a number or nothing at all."""
    try:
        return any(isinstance(node, ast.Name) for node in ast.walk(parse(text)))
    except SyntaxError:
        return False


class _Accepted(Exception):
    """The arguments can be parsed."""


def test_every_command_on_a_page_has_options_that_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    parse_args = argparse.ArgumentParser.parse_args

    def parse_only(parser: argparse.ArgumentParser, *arguments: object) -> None:
        parse_args(parser, *arguments)
        raise _Accepted

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_only)
    texts = [block.text.replace("\\\n", " ") for page in PAGES for block in blocks(page) if block.language == "sh"]
    found = [re.search(r"(?:^|[ /])(coordinator [a-z].*)", line) for text in texts for line in text.splitlines()]
    commands = {match[1].partition(" > ")[0].partition(" #")[0] for match in found if match}
    assert len(commands) > 20
    for command in commands:
        with pytest.raises(_Accepted):
            main(shlex.split(command)[1:])


def test_every_link_leads_somewhere_and_every_page_is_in_the_index() -> None:
    for name in PAGES:
        page = ROOT / name
        text = page.read_text(encoding="utf-8")
        for target, anchor in re.findall(r"\]\(([^)#:]*)(?:#([\w-]+))?\)", text):
            linked = page.parent / target if target else page
            assert linked.exists(), (name, target)
            assert not anchor or anchor in anchors(linked), (name, target, anchor)
        for file in re.findall(r"`((?:coordinator|examples|benchmarks|docs|tests)/[\w/.]+)`", text):
            assert (ROOT / file).exists(), (name, file)
    index = (ROOT / "docs/README.md").read_text(encoding="utf-8")
    pages = {path.relative_to(ROOT / "docs") for path in [*ROOT.glob("docs/*.md"), *ROOT.glob("docs/*/README.md")]}
    assert not [page for page in pages - {Path("README.md")} if f"({page})" not in index]


def anchors(page: Path) -> set[str]:
    """Returns the anchors of a page's headings, as GitHub forms them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


def test_the_reference_has_every_public_name() -> None:
    text = "".join(page.read_text(encoding="utf-8") for page in (ROOT / "docs/reference").glob("*.md"))
    documented = set(re.findall(r"^\.\. auto\w+:: coordinator\.([\w.]+)", text, re.MULTILINE))
    documented |= {"Checkpoints", "SidecarEvaluator", "__version__", "compat"}
    missing = set(coordinator.__all__) - documented
    assert {getattr(coordinator, name).__module__ for name in missing} == {"coordinator.errors"}
