"""Tests of closing, deleting and interrupting a strategy, and of programs that end without closing it."""

import json
import signal
import time
from pathlib import Path

import pytest

from tests.ps_strategy.failure_programs import closing_client, forking_client

# How long a program may take from its last line to its end, in seconds: far more than on an idle machine.
PROMPTLY = 30.0


@pytest.fixture
def end(run_program, shared_cluster):
    """Runs a program that must end soon after its last line, and returns its stderr."""

    def end(ending: str, exit_code: int = 0) -> str:
        source = Path(closing_client.__file__).read_text()
        program = run_program(source, json.dumps(shared_cluster.spec), ending, exit_code=exit_code, timeout=240)
        [said_so_at] = program.stdout.split()
        assert time.time() - float(said_so_at) < PROMPTLY
        return program.stderr

    return end


def test_every_way_to_close_leaves_nothing_behind(end):  # row 72
    assert "Traceback" not in end("close_in_every_way_then_end")


def test_a_strategy_of_which_a_part_cannot_be_made_leaves_nothing_behind(end):
    assert "Traceback" not in end("fail_while_it_is_made")


def test_a_process_that_a_program_forks_leaves_its_training_alone(run_program, shared_cluster):
    run_program(Path(forking_client.__file__).read_text(), json.dumps(shared_cluster.spec), timeout=240)


def test_tensorflow_may_be_reset_under_an_open_strategy(end):
    errors = end("reset_tensorflow")
    assert errors.count("TensorFlow is being reset, which closes the strategy") == 2
    assert "Traceback" not in errors


@pytest.mark.long
def test_a_program_ends_while_a_worker_is_dead(end, shared_cluster, strategy):
    shared_cluster.kill("worker", 2)
    try:
        assert "Traceback" not in end("end_while_a_worker_is_dead")
    finally:
        shared_cluster.restart("worker", 2)


@pytest.mark.long
def test_an_interrupt_ends_a_join_and_the_program(end):
    errors = end("interrupt_join", exit_code=-signal.SIGINT)
    assert errors.rstrip().endswith("KeyboardInterrupt")
