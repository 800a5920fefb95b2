from coordinator.testbed.cell import ASYNCHRONOUS, MODES, SEQUENTIAL, SYNCHRONOUS, Cell, grid


def test_the_grid_has_one_sequential_cell_and_delays_for_the_asynchronous_mode_alone() -> None:
    assert grid(MODES, (1, 2, 3), (0.0, 0.5)) == [
        Cell(SEQUENTIAL, 1),
        Cell(SYNCHRONOUS, 2),
        Cell(SYNCHRONOUS, 3),
        *(Cell(ASYNCHRONOUS, workers, delay) for workers in (1, 2, 3) for delay in (0.0, 0.5)),
    ]


def test_a_grid_has_only_the_modes_that_are_asked_for() -> None:
    assert grid([SYNCHRONOUS], (1, 2), (0.0, 0.5)) == [Cell(SYNCHRONOUS, 2)]


def test_a_cell_is_told_by_what_matters_in_its_mode() -> None:
    cells = [Cell(SEQUENTIAL, 1), Cell(SYNCHRONOUS, 2), Cell(ASYNCHRONOUS, 1, 0.5)]
    assert [str(cell) for cell in cells] == [
        "sequential",
        "synchronous, 2 workers",
        "asynchronous, 1 worker, delay 0.5 s",
    ]
