"""What recording events costs: the rate of small functions with the stream of events, and without.

    python -m benchmarks.event_cost [--repeats 150] [--quick] [--json FILE]

On real servers, with one strategy for all rounds of a row. In rounds without events, `record` is replaced by a function
that does nothing. Rounds take turns, in an order that is reversed each time; in each, 0.2 seconds' worth of functions,
at least 200, is scheduled and joined. Ratios are the medians of those of rounds that were made one after the other,
with their quartiles. Processor time is that of the client, for one function. The last column is what one `record`
takes by itself, times the events for a function, as a share of the time for one.
"""

import contextlib
import dataclasses
import functools
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from unittest import mock

import tensorflow as tf
from tqdm import tqdm

import coordinator
from benchmarks.alternated import alternated
from benchmarks.contestants.rate_meter import RateMeter
from benchmarks.rounds import Rounds
from benchmarks.speed_arguments import SpeedArguments, machine_line
from coordinator.events.event_stream import EventStream
from coordinator.simulation.result import aligned
from coordinator.testing import LocalCluster

WORKERS = 2
REPEATS = 150
# Short, so that other load on the machine changes little from one round to the next.
SECONDS, QUICK_SECONDS = 0.2, 0.1
# In which calls of the sizes that pay are learned and built.
WARM_UP = 10.0
LEAST_RATE = 1000.0
MOST_RUNS = 1_000_000
ROWS = ("nothing", "nothing, steps=", "nothing, one in a call", "one assign_add, one in a call")
SIDES = ("without", "with")
_US = 1e6


class Load:
    """Functions that are scheduled and joined, in rounds with events and without.

    Args:
      strategy: runs them.
      schedule: schedules the given number of them.
    """

    def __init__(self, strategy: Any, schedule: Callable[[int], object]) -> None:
        self._strategy = strategy
        self._schedule = schedule
        self._meter = RateMeter(self._run, LEAST_RATE, most_calls=MOST_RUNS)

    def round(self, seconds: float, *, has_events: bool) -> dict[str, Any]:
        """Returns the `rate`, the processor time `cpu` and the number of `events`, both of a function."""
        with contextlib.ExitStack() as ending:
            if not has_events:
                ending.enter_context(mock.patch.object(self._strategy.events, "record", _nothing_is_recorded))
            rate = self._meter.rate(seconds)
        return {"figures": {"rate": rate, "cpu": self._cpu, "events": self._events}}

    def _run(self, count: int) -> None:
        recorded, cpu = self._strategy.events.recorded, time.process_time()
        self._schedule(count)
        self._strategy.join()
        self._cpu = (time.process_time() - cpu) / count
        self._events = (self._strategy.events.recorded - recorded) / count


def measure(repeats: int, seconds: float, warm_up: float) -> dict[str, dict[str, Rounds]]:
    """Measures all rows on one cluster."""
    found: dict[str, dict[str, Rounds]] = {}
    with LocalCluster(WORKERS, 1) as cluster, tqdm(total=len(ROWS) * 2 * (repeats + 1), file=sys.stderr) as progress:

        def show(name: str) -> None:
            progress.set_description(name)
            progress.update()

        for row in ROWS:
            options = coordinator.Options(steps_per_dispatch=1 if "in a call" in row else None)
            strategy = coordinator.ParameterServerStrategy(cluster.resolver, options=options)
            with contextlib.closing(strategy):
                load = _load(strategy, row)
                runners = {side: functools.partial(load.round, seconds, has_events=side == "with") for side in SIDES}
                found[row] = alternated(runners, repeats, show, warm_up)
    return found


def seconds_of_record() -> float:
    """Returns what one `record` takes by itself, in seconds: the median of 20 times 10,000."""
    events, name, task = EventStream(), "nothing", 1
    seconds = []
    for _ in range(20):
        began = time.perf_counter()
        for _ in range(10_000):
            events.record("closures_finished", f"worker {task}", name, 1, 0.001, "")
        seconds.append((time.perf_counter() - began) / 10_000)
    return statistics.median(seconds)


def table(found: Mapping[str, Mapping[str, Rounds]], record: float) -> str:
    """Returns a row for each load; rates are functions per second, processor times microseconds.

    Args:
      found: the rounds.
      record: what one `record` takes, in seconds.
    """
    rows = []
    for title, columns in found.items():
        rates, cpus = (_ratios(columns, figure) for figure in ("rate", "cpu"))
        events, rate = (
            statistics.median(each[name] for each in columns["with"].figures) for name in ("events", "rate")
        )
        rows.append(
            (
                title,
                *(columns[side].text("rate", ",.0f") for side in SIDES),
                *rates,
                *(columns[side].text("cpu", ".2f", _US) for side in SIDES),
                *cpus,
                f"{events:.3f}",
                f"{events * record * rate:.2%}",
            )
        )
    names = (
        "functions",
        *SIDES,
        "ratio",
        "quartiles",
        "cpu us: without",
        "with",
        "ratio",
        "quartiles",
        "events",
        "share",
    )
    return aligned(names, rows)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures and prints the table."""
    assert __doc__ is not None
    chosen = SpeedArguments("event_cost", __doc__.partition("\n")[0], arguments, default_repeats=REPEATS)
    print(f"{machine_line()}, {WORKERS} workers, 1 parameter server, medians of {chosen.repeats}", flush=True)
    seconds, warm_up = (QUICK_SECONDS, 0.0) if chosen.is_quick else (SECONDS, WARM_UP)
    record, found = seconds_of_record(), measure(chosen.repeats, seconds, warm_up)
    rounds = {row: {side: dataclasses.asdict(each) for side, each in sides.items()} for row, sides in found.items()}
    chosen.write({"record": record, "rounds": rounds})
    print(table(found, record))
    print(f"One `record` takes {record * _US:.2f} us by itself.")


def _ratios(columns: Mapping[str, Rounds], figure: str) -> tuple[str, str]:
    """Returns the median of the ratios of neighboring rounds, and their quartiles."""
    pairs = zip(columns["with"].figures, columns["without"].figures, strict=True)
    ratios = [one[figure] / other[figure] for one, other in pairs]
    low, middle, high = statistics.quantiles(ratios * 2 if len(ratios) == 1 else ratios, method="inclusive")
    return f"{middle:.3f}", f"{low:.3f} to {high:.3f}"


def _load(strategy: Any, row: str) -> Load:
    with strategy.scope():
        total = tf.Variable(0.0)

    @tf.function
    def nothing() -> None:
        return

    @tf.function
    def add() -> None:
        total.assign_add(1.0)

    def schedule(count: int) -> None:
        for _ in range(count):
            strategy.schedule(add if "add" in row else nothing)

    if row.endswith("steps="):
        return Load(strategy, lambda count: strategy.schedule(nothing, steps=count))
    return Load(strategy, schedule)


def _nothing_is_recorded(*_: Any, **__: Any) -> None:
    return


if __name__ == "__main__":
    main()
