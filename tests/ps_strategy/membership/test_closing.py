"""Tests of closing, deleting and interrupting a strategy, and of programs that end without closing it."""

import json
from pathlib import Path

import pytest

from tests.ps_strategy.failure_programs import closing_client, forking_client


@pytest.fixture
def end(run_program, shared_cluster):
    """Runs a program to its end, and returns its stderr."""

    def end(ending: str) -> str:
        source = Path(closing_client.__file__).read_text()
        errors = run_program(source, json.dumps(shared_cluster.spec), ending).stderr
        assert "Traceback" not in errors, errors
        return errors

    return end


def test_every_way_to_close_leaves_nothing_behind(end):  # row 72
    end("close_in_every_way_then_end")


def test_a_process_that_a_program_forks_leaves_its_training_alone(run_program, shared_cluster):
    run_program(Path(forking_client.__file__).read_text(), json.dumps(shared_cluster.spec))


def test_tensorflow_may_be_reset_under_an_open_strategy(end):
    assert end("reset_tensorflow").count("TensorFlow is being reset, which closes the strategy") == 1


@pytest.mark.long
def test_a_program_ends_while_a_worker_is_dead(end, shared_cluster):
    shared_cluster.kill("worker", 1)
    try:
        end("end_while_functions_run")
    finally:
        shared_cluster.restart("worker", 1)
