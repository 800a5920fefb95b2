"""Tests that closing does not wait for generators of `tf.data.Dataset.from_generator`, which run in the client."""

from pathlib import Path

import pytest

from tests.ps_strategy.failure_programs import waiting_generator


@pytest.mark.long
@pytest.mark.cluster
def test_a_strategy_ends_while_generators_wait(run_program):
    assert "ended" in run_program(Path(waiting_generator.__file__).read_text()).stdout
