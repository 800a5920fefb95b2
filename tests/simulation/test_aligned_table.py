"""A table is aligned text."""

import pytest

from coordinator.simulation.aligned_table import aligned


def test_the_first_column_is_on_the_left_and_figures_are_on_the_right():
    text = aligned(("fault", "ours"), [("killed", "1.50 s"), ("frozen for long", "12.00 s")])
    assert text.splitlines() == [
        "fault               ours",
        "---------------  -------",
        "killed            1.50 s",
        "frozen for long  12.00 s",
    ]


def test_a_table_may_have_no_rows():
    assert aligned(("fault", "ours"), []).splitlines() == ["fault  ours", "-----  ----"]


def test_a_row_with_another_number_of_cells_is_refused():
    with pytest.raises(ValueError, match="2 columns, and a row has 1 cells"):
        aligned(("fault", "ours"), [("killed",)])
