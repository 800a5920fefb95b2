"""Tests that every block of code in the documentation runs: here, or in the test that a table names."""

import argparse
import ast
import json
import re
import shlex
import textwrap
from pathlib import Path

import pytest
import yaml

from coordinator.cli.command_line import main
from tests import ROOT
from tests.pages import Block, blocks, snippets, unnamed
from tests.program_runner import COORDINATOR, ProgramRunner
from tests.repository.parsing import parse

FRAGMENTS = (ROOT / "tests/repository/fragments.py").read_text(encoding="utf-8")
PAGES = sorted(str(path.relative_to(ROOT)) for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])

# Pages whose blocks are one program, with the arguments of `coordinator run`; without them it starts its own servers.
PROGRAMS = {
    "docs/devices.md": None,
    "docs/elastic.md": None,
    "docs/migrating_estimator.md": ["--evaluator"],
    "docs/migrating_mirrored.md": [],
    "docs/recovery.md": [],
    "docs/tutorial.md": None,
}
# Pages whose blocks are fragments.
FRAGMENTED = [
    "docs/checkpoints.md",
    "docs/dashboard.md",
    "docs/data.md",
    "docs/data_service.md",
    "docs/dispatch.md",
    "docs/evaluation.md",
    "docs/events.md",
    "docs/guarantees.md",
    "docs/kubernetes.md",
    "docs/slurm.md",
    "docs/trace.md",
]
# Pages whose Python is run by other tests.
ELSEWHERE = {
    "README.md": "tests/repository/test_readme.py",
    "docs/embeddings.md": "tests/embeddings/test_page.py",
    "docs/serving.md": "tests/embeddings/test_page.py",
    "docs/sparse_updates.md": "tests/embeddings/test_page.py",
    "docs/tables.md": "tests/embeddings/test_page.py",
    "docs/keras/exactness.md": "tests/repository/test_keras_docs.py",
    "docs/keras/fit.md": "tests/repository/test_keras_docs.py",
    "docs/keras/models.md": "tests/repository/test_keras_docs.py",
    "docs/migrating.md": "tests/repository/test_migrating.py",
    "docs/simulation.md": "tests/simulation/test_docs.py",
    **{str(path.relative_to(ROOT)): "tests/repository/test_docs.py" for path in ROOT.glob("docs/updates/*.md")},
}


@pytest.mark.cluster
@pytest.mark.release
@pytest.mark.timeout(400)
@pytest.mark.parametrize("page", PROGRAMS)
def test_the_blocks_of_a_page_run_as_one_program(run_program: ProgramRunner, tmp_path: Path, page: str) -> None:
    # The last one of the tutorial is of another program.
    parts = snippets(page)[:-1] if page == "docs/tutorial.md" else snippets(page)
    options = PROGRAMS[page]
    if options is None:
        printed = run_program("\n".join(parts), timeout=380).stdout
    else:
        (tmp_path / "program.py").write_text("\n".join(parts), encoding="utf-8")
        arguments = ["run", "--workers", 2, "--ps", 1, *options, tmp_path / "program.py"]
        printed = run_program(COORDINATOR, *arguments, timeout=380).stdout
    last = {
        "docs/devices.md": "100 updates",
        "docs/elastic.md": "2 workers",
        "docs/migrating_estimator.md": "[evaluator] step 300: ",
        "docs/migrating_mirrored.md": "Epoch 2/2",
        "docs/recovery.md": "trained for 1000 steps",
        "docs/tutorial.md": "480 steps",
    }
    assert last[page] in printed, printed


@pytest.mark.cluster
@pytest.mark.release
@pytest.mark.timeout(400)
@pytest.mark.parametrize("page", FRAGMENTED)
def test_the_fragments_of_a_page_run(run_program: ProgramRunner, tmp_path: Path, page: str) -> None:
    folder = tmp_path / Path(page).stem
    folder.mkdir()
    files = [folder / f"block_{number}.py" for number, _ in enumerate(snippets(page))]
    for file, text in zip(files, snippets(page), strict=True):
        is_body = re.search("^return ", text, re.MULTILINE)
        whole = "def dataset_fn(context):\n" + textwrap.indent(text, "    ") if is_body else text
        file.write_text(whole.replace('"/checkpoints', f'"{tmp_path}'), encoding="utf-8")
    (tmp_path / "program.py").write_text(FRAGMENTS, encoding="utf-8")
    arguments = ["run", "--workers", 2, "--ps", 2, tmp_path / "program.py", *files]
    assert f"ran {len(files)} blocks\n" in run_program(COORDINATOR, *arguments, timeout=380).stdout


def test_every_page_with_python_is_run_by_a_test() -> None:
    with_python = {page for page in PAGES if snippets(page)}
    assert with_python == {*PROGRAMS, *FRAGMENTED, *ELSEWHERE} & with_python, "Name the test of its blocks above."
    for page, test in ELSEWHERE.items():
        assert Path(page).name in (ROOT / test).read_text(encoding="utf-8") or Path(page).parent.name == "updates"
    assert {*PROGRAMS, *FRAGMENTED} <= with_python


def test_every_block_of_python_is_python() -> None:
    for page in PAGES:
        for text in snippets(page):
            parse(text, page)


def is_python(text: str) -> bool:
    """Whether a text is Python and has a name in it, unlike a number or nothing at all."""
    try:
        return any(isinstance(node, ast.Name) for node in ast.walk(parse(text)))
    except SyntaxError:
        return False


def test_no_block_of_python_is_left_without_its_name() -> None:
    assert not [(page, text) for page in PAGES for text in unnamed(page) if is_python(text)], "Write ```python."
    assert is_python("model.fit(x)")


def data_blocks() -> list[tuple[str, Block]]:
    return [(page, block) for page in PAGES for block in blocks(page) if block.language in ("json", "yaml")]


@pytest.mark.parametrize(("page", "block"), data_blocks(), ids=lambda value: value if isinstance(value, str) else "")
def test_every_block_of_data_can_be_read(page: str, block: Block) -> None:
    if block.language == "json":
        assert all(isinstance(json.loads(line), dict) for line in block.text.splitlines())
    else:
        assert list(yaml.safe_load_all(block.text))


def commands() -> list[str]:
    """The calls of `coordinator` in all blocks of shell commands."""
    texts = [block.text.replace("\\\n", " ") for page in PAGES for block in blocks(page) if block.language == "sh"]
    found = [re.search(r"(?:^|[ /])(coordinator [a-z].*)", line) for text in texts for line in text.splitlines()]
    return sorted({match[1].partition(" > ")[0].partition(" #")[0] for match in found if match})


class _Accepted(Exception):
    """The arguments can be parsed."""


@pytest.mark.parametrize("command", commands())
def test_every_command_has_options_that_exist(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    parse = argparse.ArgumentParser.parse_args

    def parse_only(parser: argparse.ArgumentParser, *arguments: object) -> None:
        parse(parser, *arguments)
        raise _Accepted

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_only)
    with pytest.raises(_Accepted):
        main(shlex.split(command)[1:])


def test_every_block_names_a_language_that_is_tested() -> None:
    languages = {block.language for page in PAGES for block in blocks(page)}
    assert languages <= {"json", "python", "sh", "yaml"}
