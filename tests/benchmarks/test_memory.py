"""The benchmark of memory restarts a worker of both sides, and its table has the growth of each process."""

import json

import pytest

from benchmarks.memory import SIDES, table

PROGRAM = """
    import sys

    from benchmarks.memory import main

    main(sys.argv[1:])
"""


@pytest.mark.cluster
@pytest.mark.release
@pytest.mark.timeout(700)
def test_both_sides_bear_a_restart(run_program, tmp_path):
    path = tmp_path / "figures.json"
    run_program(PROGRAM, "--quick", "--json", path, timeout=680)
    found = json.loads(path.read_text())["found"]
    assert set(found) == set(SIDES)
    for sizes in found.values():
        assert set(sizes) == {"client", "ps 0", "ps 1"}
        assert all(before > 0 and after > 0 for before, after in sizes.values())


def test_the_table_has_the_growth_in_all_and_by_restart():
    _, _, row = table({"ours": {"client": [200_000_000, 205_000_000, 210_000_000]}}).splitlines()
    assert row.split() == ["ours,", "client", "200", "210", "+5.0%", "5.00"]
