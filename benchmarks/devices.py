"""A worker with two devices: as two replicas, as one device, and under TensorFlow's own coordinator.

    python -m benchmarks.devices [--repeats 5] [--quick] [--json FILE]

The network of `benchmarks.dense` learns with 64 images a step, on one worker and one parameter server: in one call; or
as two replicas with 32 each, on two logical CPU devices, whose gradients are added up on the worker and applied once.
TensorFlow's coordinator uses one device of a worker. All devices share the processor, so two of them do not compute
faster than one; the figures say what replicas cost.
"""

from collections.abc import Sequence

from benchmarks.contest import Contest, Found, plain
from benchmarks.rate_table import rate_table
from benchmarks.speed_arguments import SpeedArguments, machine_line

COLUMNS = {"one device": ("ours", "64"), "two devices": ("devices", "32 x 2"), "peer": ("peer", "64")}
RATIOS = (("one device", "peer"), ("two devices", "peer"), ("two devices", "one device"))
SECONDS, QUICK_SECONDS = 2.0, 0.3
WARM_UP = 15.0


def contest() -> Contest:
    """Returns the contest of the step on all sides."""
    return Contest("dense", {"digits, batch 64": COLUMNS}, workers=1, ps=1)


def table(found: Found) -> str:
    """Returns one row; rates are examples per second."""
    return rate_table("examples/s", tuple(COLUMNS), RATIOS, found)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures and prints the table."""
    assert __doc__ is not None
    chosen = SpeedArguments("devices", __doc__.partition("\n")[0], arguments)
    print(f"{machine_line()}, 1 worker, 1 parameter server, medians of {chosen.repeats}", flush=True)
    seconds, warm_up = (QUICK_SECONDS, 0.0) if chosen.is_quick else (SECONDS, WARM_UP)
    found = contest().measure(chosen.repeats, seconds, warm_up)
    chosen.write(plain(found))
    print(table(found))


if __name__ == "__main__":
    main()
