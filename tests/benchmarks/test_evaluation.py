"""The benchmark of evaluation runs on real servers, and each example counts once."""

import pytest

PROGRAM = """
    from benchmarks.evaluation import main

    main(["--repeats", "1", "--kills", "1", "--examples", "500"])
"""


@pytest.mark.cluster
@pytest.mark.release
@pytest.mark.timeout(300)
def test_evaluations_with_killed_workers_are_exact(run_program):
    assert ": 1 exact" in run_program(PROGRAM, timeout=280).stdout
