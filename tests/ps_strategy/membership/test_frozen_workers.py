"""Real workers stop answering without dying.

who freezes              when                        what the caller sees
one after the other,     all of them work            each closure runs elsewhere once the silence is noticed; the other
ten times                                            the others continue; the frozen one is used again when it thaws
one, for good            functions are scheduled     join returns, close returns
"""

import json
import statistics
from pathlib import Path

import pytest

from tests.program_runner import ProgramRunner
from tests.ps_strategy.failure_programs import frozen_workers
from tests.ps_strategy.failure_programs.frozen_workers import FREEZES

pytestmark = [pytest.mark.cluster, pytest.mark.long]


@pytest.fixture(scope="module")
def seen(interpreter, tmp_path_factory) -> dict:
    run_program = ProgramRunner(interpreter, tmp_path_factory.mktemp("programs"))
    program = run_program(Path(frozen_workers.__file__).read_text(), timeout=280)
    return json.loads(program.stdout.splitlines()[-1])


def test_the_other_workers_never_pause(seen):
    assert len(seen["freezes"]) == FREEZES
    assert all(freeze["after"] > 0 for freeze in seen["freezes"])
    ratios = [freeze["after"] / max(1, freeze["before"]) for freeze in seen["freezes"]]
    # On an idle machine it is above 1, since they also get the frozen worker's share of the processors.
    assert statistics.median(ratios) > 0.5, ratios


def test_no_function_is_lost_and_those_on_frozen_workers_run_once_more(seen):
    assert seen["finished"] >= seen["scheduled"]
    assert 1 <= seen["retried"] <= 2 * FREEZES
    assert seen["scheduled"] <= seen["count"] <= seen["scheduled"] + seen["retried"]


def test_join_and_close_do_not_wait_for_a_worker_that_stays_frozen(seen):
    assert seen["results while frozen"] == 30
