from coordinator.testbed.cell import SEQUENTIAL, SYNCHRONOUS, Cell
from coordinator.testbed.experiment import Experiment
from coordinator.testbed.loss_picture import draw, shown_with
from tests.testbed.made_up import asynchronous, curve

SEQUENCE, TOGETHER = curve(Cell(SEQUENTIAL, 1)), curve(Cell(SYNCHRONOUS, 2))
LATE = [asynchronous(2, delay) for delay in (0.0, 0.5, 1.0, 1.5, 2.0)]


def test_a_picture_shows_one_number_of_workers_and_the_sequential_training() -> None:
    curves = [SEQUENCE, TOGETHER, *LATE, asynchronous(3, 0.0)]
    assert shown_with(curves, 2) == [SEQUENCE, TOGETHER, *LATE]
    assert shown_with(curves, 3) == [SEQUENCE, curves[-1]]


def test_the_sequential_training_alone_is_no_picture() -> None:
    assert shown_with([SEQUENCE, TOGETHER], 1) == []


def test_every_line_has_a_name_and_looks_of_its_own_and_axes_have_units() -> None:
    figure = draw([SEQUENCE, TOGETHER, *LATE], 2, Experiment())
    (axes,) = figure.axes
    assert axes.get_title() == "2 workers, digits, steps of 0.2 s"
    assert axes.get_xlabel() == "processed minibatches (of 100 images)"
    assert axes.get_ylabel() == "training loss (cross entropy in nats, mean of 10 minibatches)"
    *lines, target = axes.lines
    assert [line.get_label() for line in lines] == [
        "sequential",
        "synchronous",
        *(f"asynchronous, delay {delay:g} s" for delay in (0, 0.5, 1, 1.5, 2)),
    ]
    assert target.get_label() == "loss of 1"
    looks = {(line.get_color(), line.get_marker()) for line in lines}
    assert len({colour for colour, _ in looks}) == len(lines)
    assert len({line.get_marker() for line in lines[2:]}) == len(LATE)
    for line, shown in zip(lines, [SEQUENCE, TOGETHER, *LATE], strict=True):
        assert line.get_ydata().tolist() == shown.smoothed.tolist()


def test_a_training_that_is_lost_does_not_flatten_the_others() -> None:
    lost = asynchronous(2, 2.0)
    lost.losses[100:] = 1e6
    (axes,) = draw([SEQUENCE, lost], 2, Experiment()).axes
    assert axes.get_ylim()[1] < 8
    lost.losses[100:] = float("nan")
    (axes,) = draw([SEQUENCE, lost], 2, Experiment()).axes
    assert 0 < axes.get_ylim()[1] < 8
