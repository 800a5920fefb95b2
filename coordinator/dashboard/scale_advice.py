"""Predicts how fast training would be with other numbers of workers, from measurements with the present number.

The cluster is modelled as a closed queueing network, because a worker that has finished a step begins the next one. All
workers share some resources: the processes of the parameter servers and of the client, and their hosts' processors. A
step uses each resource for some time, and waits while steps of other workers use the resource. For the rest of its
time, the step needs only its worker. Mean value analysis computes the rate of such a network for any number of workers.

No resource can be busy for more than 100 % of the time. If a step needs 40 ms of processor time on a host with two
processors, the rate is at most 50 steps per second with any number of workers. The network alone would exceed this
limit, because its steps use one resource at a time, while real steps use a process and a processor together.

Sources: Reiser, Lavenberg, "Mean-Value Analysis of Closed Multichain Queuing Networks" (1980); Lazowska et al.,
"Quantitative System Performance" (1984), chapter 5 about bounds and chapter 6 about mean value analysis.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence

# A further worker is useful if it adds this share of a single worker's rate.
_WORTH = 0.5
# Rates are computed up to this multiple of the present number of workers. Measurements say nothing beyond that.
_FURTHEST = 4
# If workers are idle for more than this share while no function waits, the program schedules too little work.
_IDLE = 0.25
# A resource limits the rate if it is busy for this share of the time.
_BUSY = 0.8
# A resource that is busy for this share may be as busy with fewer workers, but no measurement says with how many.
_FULL = 0.95


@dataclasses.dataclass(frozen=True)
class Resource:
    """Something that the steps of all workers share, such as `parameter server 1`, or `the processors of host a`.

    `share` is the busy share of its time, from 0 to 1, over all its processors.
    """

    name: str
    share: float


@dataclasses.dataclass(frozen=True)
class Load:
    """The measurements with the present number of workers, at least 1.

    `rate`, above 0, is in steps per second of all workers together. `idle` is the share of the workers' time in which
    they had nothing to run. `waiting` is the number of scheduled functions that wait for a worker.
    """

    workers: int
    rate: float
    resources: Sequence[Resource]
    idle: float = 0.0
    waiting: int = 1

    @property
    def busiest(self) -> Resource:
        """The resource that first limits the rate when workers are added."""
        return max(self.resources, key=lambda resource: resource.share)


@dataclasses.dataclass(frozen=True)
class ScaleAdvice:
    """A recommended number of workers.

    Attributes:
      target: the greatest number with which each worker adds at least half of a single worker's rate.
      rate: steps per second of all workers together.
      expected: number of workers -> rate, up to four times the present number.
      bottleneck: the resource that first limits the rate when workers are added.
      busy: how busy the bottleneck is, from 0 to 1.
    """

    workers: int
    target: int
    rate: float
    expected: dict[int, float]
    bottleneck: str
    busy: float
    text: str


def scale_advice(load: Load) -> ScaleAdvice:
    """Computes the advice."""
    busiest, workers = load.busiest, load.workers
    if load.waiting == 0 and load.idle > _IDLE and busiest.share < _BUSY:
        return _advice_to_schedule_more(load)
    expected = dict(enumerate(expected_rates(load, _FURTHEST * workers), start=1))
    gains = {n: expected[n] - expected.get(n - 1, 0.0) for n in expected}
    target = max(itertools.takewhile(lambda n: gains[n] >= _WORTH * expected[1], expected))
    more = max(2, workers // 4)
    gain = expected[workers + more] / expected[workers] - 1
    verb = "are" if busiest.name.startswith("the processors") else "is"
    limits = "the bottleneck" if busiest.share >= _WORTH else "the busiest"
    text = f"{more} more workers would bring {gain:.0%}; {busiest.name} {verb} {limits} ({busiest.share:.0%})."
    if busiest.share >= _FULL and workers > 1:
        text += " Fewer workers may be as fast."
    return ScaleAdvice(workers, target, load.rate, expected, busiest.name, busiest.share, text)


def expected_rates(load: Load, most: int) -> list[float]:
    """Returns the rate in steps per second with 1, 2, ..., `most` workers."""
    demands = [resource.share / load.rate for resource in load.resources]
    rates = list(_rates(own_seconds(load), demands, max(most, load.workers)))
    # The measured rate may be above the network's rate, even with no own time of a step.
    factor = load.rate / rates[load.workers - 1]
    limit = load.rate / load.busiest.share if load.busiest.share else math.inf
    return [min(factor * rate, limit) for rate in rates[:most]]


def own_seconds(load: Load) -> float:
    """Returns the seconds in which a step needs only its worker, so that the computed rate is the measured rate."""
    demands = [resource.share / load.rate for resource in load.resources]
    low, high = 0.0, load.workers / load.rate
    # 20 halvings give a precision of a millionth of the time between two steps of a worker.
    for _ in range(20):
        middle = (low + high) / 2
        *_, rate = _rates(middle, demands, load.workers)
        low, high = (middle, high) if rate > load.rate else (low, middle)
    return low


def _rates(own: float, demands: Iterable[float], most: int) -> Iterator[float]:
    """Yields the rates with 1, 2, ..., `most` workers, by mean value analysis."""
    demands = list(demands)
    queues = [0.0] * len(demands)
    for workers in range(1, most + 1):
        waits = [demand * (1 + queue) for demand, queue in zip(demands, queues, strict=True)]
        rate = workers / max(own + sum(waits), 1e-9)
        queues = [rate * wait for wait in waits]
        yield rate


def _advice_to_schedule_more(load: Load) -> ScaleAdvice:
    workers = load.workers
    needed = max(1, math.ceil(workers * (1 - load.idle)))
    of_one = load.rate / (workers * (1 - load.idle)) if load.idle < 1 else load.rate
    expected = {n: min(n * of_one, load.rate) for n in range(1, _FURTHEST * workers + 1)}
    text = (
        f"More workers would bring nothing: the workers are idle {load.idle:.0%} of the time, and nothing waits for "
        f"them. Schedule further ahead: join less often."
    )
    return ScaleAdvice(workers, needed, load.rate, expected, "the program", load.idle, text)
