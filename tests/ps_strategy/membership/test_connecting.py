"""Tests of creating a strategy while servers are missing, dying or returning, and while another one is open."""

import json
import signal
from pathlib import Path

import keras
import pytest

import coordinator
from tests.ps_strategy.every_worker import unhealthy
from tests.ps_strategy.failure_programs import connecting_client, trainer


@pytest.mark.cluster
def test_a_strategy_connects_to_servers_that_answer_and_waits_for_the_rest(run_program):  # row 81
    run_program(Path(connecting_client.__file__).read_text(), timeout=280)


def test_a_second_strategy_is_refused_while_one_is_open(shared_cluster, strategy):  # row 5
    with pytest.raises(RuntimeError, match=r"close the first one \(strategy\.close\(\)\) before making another"):
        coordinator.ParameterServerStrategy(shared_cluster.resolver)
    assert unhealthy(strategy) == ()


def test_another_backend_of_keras_is_refused(shared_cluster, monkeypatch):
    monkeypatch.setattr(keras.backend, "backend", lambda: "jax")
    with pytest.raises(RuntimeError, match=r"Keras runs on 'jax' in this process.*Set KERAS_BACKEND=tensorflow"):
        coordinator.ParameterServerStrategy(shared_cluster.resolver)


def test_a_client_that_was_killed_starts_again_on_the_same_servers(run_program, shared_cluster):  # row 87
    source, spec = Path(trainer.__file__).read_text(), json.dumps(shared_cluster.spec)
    killed = run_program(source, spec, "killed", exit_code=-signal.SIGKILL)
    again = run_program(source, spec, "to the end")
    assert killed.stdout == "10 steps\n"
    assert again.stdout == "10 steps\n10 more\n"
