"""The statements of `docs/keras` and `docs/patches.md`: snippets run; tests and files that they name exist."""

import importlib.util
import re
from pathlib import Path

import keras
import pytest

import coordinator
from tests import ROOT
from tests.pages import snippets
from tests.program_runner import COORDINATOR, ProgramRunner

DOCS = ROOT / "docs" / "keras"
FEATURES = ROOT / "tests" / "ps_strategy" / "keras" / "README.md"
PAGES = [*sorted(DOCS.glob("*.md")), FEATURES, ROOT / "docs" / "patches.md"]


@pytest.mark.cluster
@pytest.mark.release
@pytest.mark.timeout(400)
@pytest.mark.parametrize("page", ["models.md", "fit.md"])
def test_the_blocks_of_a_page_run_as_one_program(run_program: ProgramRunner, tmp_path: Path, page: str) -> None:
    (tmp_path / "program.py").write_text("\n".join([*snippets(DOCS / page), "strategy.close()"]), encoding="utf-8")
    printed = run_program(COORDINATOR, "run", "--workers", 2, "--ps", 2, tmp_path / "program.py", timeout=380).stdout
    if page == "models.md":
        before, after = map(float, re.findall(r"error ([\d.]+) then ([\d.]+)", printed)[0])
        assert after < before
        assert "done" in printed
    else:
        assert len(re.findall(r"^Epoch \d/", printed, re.MULTILINE)) == 3 + 2 + 2 + 3 + 3 + 2 + 2 + 2


@pytest.mark.long
def test_the_accumulation_that_a_page_recommends_is_exact(
    strategy: coordinator.ParameterServerStrategy, tmp_path: Path
) -> None:
    [snippet] = snippets(DOCS / "exactness.md")
    # A file, because the source of a function is read when it is traced.
    (tmp_path / "snippet.py").write_text(snippet, encoding="utf-8")
    spec = importlib.util.spec_from_file_location("snippet", tmp_path / "snippet.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    vars(module)["strategy"] = strategy
    spec.loader.exec_module(module)
    statistics = module.rule.statistics()
    assert int(module.optimizer.iterations) == statistics.updates > 0
    assert statistics.pushes - statistics.rejected >= 4 * statistics.updates


def test_every_test_that_a_page_names_is_there() -> None:
    text = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    named = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", text)
    assert len(named) > 40
    for path, test in named:
        assert f"def {test}" in (ROOT / path).read_text(encoding="utf-8"), (path, test)


def test_every_feature_has_a_test() -> None:
    rows = re.findall(r"^\| (.+?) \| (.+?) \|$", FEATURES.read_text(encoding="utf-8"), re.MULTILINE)
    assert rows[0] == ("Feature", "Test")
    assert len(rows) > 25
    assert not [feature for feature, shown in rows[1:] if not shown.startswith("`tests/")]


def test_every_optimizer_of_keras_is_in_the_table() -> None:
    exported = [value for value in vars(keras.optimizers).values() if isinstance(value, type)]
    optimizers = {kind.__name__ for kind in exported if issubclass(kind, keras.optimizers.Optimizer)} - {"Optimizer"}
    rows = re.findall(r"^\| (`[^|]*) \|", (DOCS / "exactness.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert len(optimizers) > 12
    assert optimizers <= {name for row in rows for name in re.findall(r"`(\w+)`", row)}


def test_every_link_and_every_named_file_is_there() -> None:
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for target in re.findall(r"\]\(([^)#]+)(?:#[\w-]+)?\)", text):
            assert (page.parent / target).exists(), (page, target)
        for name in re.findall(r"`((?:coordinator|examples|benchmarks|docs|tests)/[\w/.]+)", text):
            assert (ROOT / name).exists(), (page, name)
