"""Tests of the documentation as a site: its reference has every public name, and it is built without a warning."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import coordinator
from tests import ROOT

REFERENCE = ROOT / "docs" / "reference"


def test_the_reference_has_every_public_name() -> None:
    text = "".join(page.read_text(encoding="utf-8") for page in REFERENCE.glob("*.md"))
    documented = set(re.findall(r"^\.\. auto\w+:: coordinator\.([\w.]+)", text, re.MULTILINE))
    documented |= {"Checkpoints", "SidecarEvaluator", "__version__", "compat"}
    missing = set(coordinator.__all__) - documented
    assert {getattr(coordinator, name).__module__ for name in missing} == {"coordinator.errors"}


@pytest.mark.release
@pytest.mark.timeout(600)
def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-c", "docs", ".", tmp_path]
    built = subprocess.run(build, cwd=ROOT, capture_output=True, text=True, check=False)
    assert built.returncode == 0, f"{built.stderr}\nInstall what it needs with: pip install -e '.[docs]'"
    pages = [page.relative_to(ROOT) for page in (ROOT / "docs").rglob("*.md")]
    assert not [page for page in pages if not (tmp_path / page).with_suffix(".html").exists()]
    contents = (tmp_path / "docs" / "README.html").read_text(encoding="utf-8")
    assert all(
        f'href="{page.relative_to("docs").with_suffix(".html")}"' in contents
        for page in pages
        if page != Path("docs/README.md")
    )
    api = (tmp_path / "docs/reference/api.html").read_text(encoding="utf-8")
    for name in (
        "ParameterServerStrategy.schedule",
        "updates.BoundedDelay",
        "data.Epochs",
        "testing.LocalCluster.kill",
    ):
        assert f'id="coordinator.{name}"' in api
    commands = (tmp_path / "docs/reference/command_line.html").read_text(encoding="utf-8")
    assert "--server-restarts" in commands
    assert 'url=docs/README.html"' in (tmp_path / "index.html").read_text(encoding="utf-8")
