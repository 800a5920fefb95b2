"""The steps of TensorFlow's tutorial on parameter-server training run with two imports changed."""

import re
from pathlib import Path

import pytest

from tests.program_runner import ProgramRunner

TUTORIAL = Path(__file__).with_name("tutorial.py").read_text(encoding="utf-8")


# `test_programs.py` has its calls one by one.
@pytest.mark.long
@pytest.mark.cluster
@pytest.mark.parametrize("legacy", ["0", "1"], ids=["Keras 3", "Keras 2"])
def test_the_steps_of_the_tutorial_run_with_servers_in_the_same_process(
    run_program: ProgramRunner, tmp_path: Path, legacy: str
) -> None:
    ended = run_program(TUTORIAL, tmp_path, timeout=240, environment={"TF_USE_LEGACY_KERAS": legacy})
    printed = ended.stdout
    assert "fit: 3 epochs, 60 steps" in printed
    assert [int(count) for count in re.findall(r"^epoch \d: accuracy \S+ of (\d+)$", printed, re.MULTILINE)] == 8 * [
        160
    ]
    [last] = re.findall(r"^epoch 7: accuracy (\S+)", printed, re.MULTILINE)
    assert float(last) > 0.75
    assert re.search(r"^distributed evaluation: \S+ of 16$", printed, re.MULTILINE)
    assert "evaluated ckpt-1" in printed
    assert "parts of the embedding: 2" in printed
