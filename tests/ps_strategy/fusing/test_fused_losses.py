"""Servers that are killed while functions run several times in one call.

what dies            what the caller sees
a worker             every function has its result; those that were in its call ran again
a parameter server   its variables are restored, every function has its result, and fused calls go on
"""

import json
from pathlib import Path

import pytest

from tests.program_runner import ProgramRunner
from tests.ps_strategy.failure_programs import fused_losses
from tests.ps_strategy.failure_programs.fused_losses import STEPS

PROGRAM_TIMEOUT = 280
pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def seen(tmp_path_factory) -> dict:
    run_program = ProgramRunner(tmp_path_factory.mktemp("programs"))
    program = run_program(Path(fused_losses.__file__).read_text(), timeout=PROGRAM_TIMEOUT)
    return json.loads(program.stdout.splitlines()[-1])


def test_no_function_is_lost_with_the_worker_that_ran_it_among_others(seen):
    found = seen["worker"]
    assert found["results"] == list(range(STEPS))
    assert found["fewest runs"] >= 1
    assert found["losses"] >= 1
    assert found["retried"] >= 1


def test_fused_calls_go_on_with_the_variables_of_a_parameter_server_that_was_restored(seen):
    found = seen["parameter server"]
    assert found["results"] == found["results afterwards"] == list(range(STEPS))
    assert found["counted afterwards"] == STEPS
    assert found["counted since the checkpoint"] > 0
    assert found["fused afterwards"] > 0
    assert found["traced again"] == 0
