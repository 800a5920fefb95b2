"""The Keras 3 examples run by the commands in their docstrings, end by themselves, and do what these say."""

import re
from pathlib import Path

import pytest

from tests import ROOT
from tests.examples.test_examples import printed_by
from tests.program_runner import ProgramRunner

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(400)]


@pytest.mark.long
def test_fit_learns_the_digits_on_parameter_servers(run_program: ProgramRunner, tmp_path: Path) -> None:
    printed = printed_by(run_program, "keras_fit/train.py", "--directory", str(tmp_path / "digits"))
    assert held_out_accuracy(printed) > 0.95
    assert (tmp_path / "digits" / "best.keras").exists()
    assert list((tmp_path / "digits" / "validation").glob("events.out.tfevents.*"))


@pytest.mark.long
def test_fit_learns_them_by_a_rule_of_the_command_line(run_program: ProgramRunner, tmp_path: Path) -> None:
    rule = ["--rule", "StaleSynchronous", "--rule-option", "get_model_frequency=4", "--rule-option", "max_lead=8"]
    printed = printed_by(run_program, "keras_fit/train.py", "--directory", str(tmp_path / "digits"), *rule)
    assert held_out_accuracy(printed) > 0.95


@pytest.mark.long
def test_the_same_program_learns_them_under_another_strategy(run_program: ProgramRunner, tmp_path: Path) -> None:
    source = (ROOT / "examples/keras_fit/train.py").read_text(encoding="utf-8")
    printed = run_program(source, "--directory", tmp_path / "digits", "--strategy", "mirrored", timeout=360).stdout
    assert held_out_accuracy(printed) > 0.95


@pytest.mark.long
def test_a_custom_loop_counts_every_step_and_learns_the_digits(run_program: ProgramRunner) -> None:
    printed = printed_by(run_program, "keras_loop/train.py")
    assert len(re.findall(r"^epoch \d+: loss \S+, accuracy \S+$", printed, re.MULTILINE)) == 10
    assert "400 updates of 400 steps" in printed
    assert held_out_accuracy(printed) > 0.95


@pytest.mark.long
# row 189: wide and deep
def test_a_wide_and_deep_model_learns_from_a_table(run_program: ProgramRunner) -> None:
    printed = printed_by(run_program, "wide_and_deep/train.py")
    assert "Epoch 12/12" in printed
    assert held_out_accuracy(printed) > 0.93


def held_out_accuracy(printed: str) -> float:
    """Returns the last accuracy on held-out images that a program printed."""
    found = re.findall(r"held-out accuracy ([\d.]+)", printed)
    assert found, printed
    return float(found[-1])
