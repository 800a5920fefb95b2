"""A worker that has a GPU computes there what it can, and learns what it would learn without one."""

import shutil
from pathlib import Path

import pytest

from tests.program_runner import ProgramRunner

ENVIRONMENT = {"CUDA_VISIBLE_DEVICES": "0", "TF_FORCE_GPU_ALLOW_GROWTH": "true", "NVIDIA_TF32_OVERRIDE": "0"}


@pytest.mark.release
@pytest.mark.cluster
@pytest.mark.skipif(shutil.which("nvidia-smi") is None, reason="did not run: this machine has no NVIDIA GPU")
def test_a_worker_with_a_gpu_computes_on_it_and_learns_the_same(run_program: ProgramRunner) -> None:
    run_program(Path(__file__).with_name("gpu_program.py").read_text(), timeout=280, environment=ENVIRONMENT)
