"""Tests of the workflows of GitHub: they can be read, and each job calls a script of .ci, which people run too."""

import os
import re
from collections.abc import Iterator
from typing import Any

import yaml

from tests import ROOT

WORKFLOWS = {
    path.stem: yaml.safe_load(path.read_text(encoding="utf-8")) for path in (ROOT / ".github/workflows").glob("*.yml")
}


def steps() -> Iterator[dict[str, Any]]:
    for workflow in WORKFLOWS.values():
        for job in workflow["jobs"].values():
            assert job["runs-on"]
            yield from job["steps"]


def test_pushes_nights_and_tags_have_their_workflows() -> None:
    # YAML reads the key `on` as true.
    triggers = {name: list(workflow[True]) for name, workflow in WORKFLOWS.items()}
    assert triggers.pop("nightly") == ["schedule", "workflow_dispatch"]
    assert triggers == {"push": ["push", "pull_request"], "release": ["push"]}
    assert list(WORKFLOWS["release"][True]["push"]) == ["tags"]
    assert all(workflow["permissions"] == {"contents": "read"} for workflow in WORKFLOWS.values())


def test_each_job_calls_one_script() -> None:
    for workflow in WORKFLOWS.values():
        for name, job in workflow["jobs"].items():
            [script] = [step["run"].split()[0] for step in job["steps"] if "run" in step]
            assert re.fullmatch(r"\.ci/(build|matrix|release|run)", script), name
    assert all(os.access(script, os.X_OK) for script in ROOT.glob(".ci/*") if script.is_file() and not script.suffix)


def test_each_action_is_pinned_to_a_major_version() -> None:
    used = [step["uses"] for step in steps() if "uses" in step]
    assert used
    assert not [action for action in used if not re.fullmatch(r"actions/[\w-]+@v\d+", action)]
