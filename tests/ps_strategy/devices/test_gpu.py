"""A worker that has a GPU computes there what it can, and learns what it would learn without one."""

import json
import shutil
from pathlib import Path

import pytest

from tests.program_runner import ProgramRunner
from tests.ps_strategy.devices import gpu_program

pytestmark = [
    pytest.mark.release,
    pytest.mark.cluster,
    pytest.mark.skipif(shutil.which("nvidia-smi") is None, reason="did not run: this machine has no NVIDIA GPU"),
]
ENVIRONMENT = {"CUDA_VISIBLE_DEVICES": "0", "TF_FORCE_GPU_ALLOW_GROWTH": "true", "NVIDIA_TF32_OVERRIDE": "0"}


def test_a_worker_with_a_gpu_computes_on_it_and_learns_the_same(run_program: ProgramRunner) -> None:
    source = Path(gpu_program.__file__).read_text()
    found = json.loads(run_program(source, timeout=280, environment=ENVIRONMENT).stdout.splitlines()[-1])
    assert found["replicas"] == 1
    assert found["bytes"]["worker"] >= gpu_program.BYTES
    assert found["bytes"]["ps"] == 0
    means = [found["mean"], *found["steps"], found["left"] - 1.0, found["after a restart"]]
    assert means == pytest.approx([0.5] * 8, abs=0.01)
    assert found["data"] == [[2.0, ["0", "1"]], [10.0, ["2", "3"]], [18.0, ["4", "5"]]]
    assert found["words"] == [["A BC", "D"], [[1, 2], [1, 0]], ["0", "1", "2"]]
    for name, losses in found["alone"].items():
        assert found["fit"][name] == pytest.approx(losses, rel=1e-3), name
    assert found["rule"][-1] < found["rule"][0] / 2
    assert found["rounded"] == pytest.approx(found["rule"], rel=0.05)
    assert found["table"][-1] < found["table"][0]
    assert found["rows"] == gpu_program.KEYS.max() + 1
