"""Decides how many steps of a function a worker runs in one call.

The size of a call depends on measured values only. A call of k steps takes a + k * b seconds: a for the way to the
worker and back, b for each step. Both values are learned from calls of one step and of k steps. The chosen size makes a
small compared with k * b, but keeps the call short.

A call of a new size must be built (traced, sent to the worker, prepared there). Per step, the build takes about as long
as building the function itself. So there are few sizes, and a larger size is built when it would already have saved a
good part of its building time, on the assumption that most of the training is still to come. `Builds` builds the call
in the background, while the worker makes calls of ready sizes.
"""

import dataclasses
import math
from collections import OrderedDict
from collections.abc import Hashable, Mapping

# The maximum share of a call's time that its overhead may take.
_OVERHEAD = 0.025
# The maximum duration of a call of several steps, in seconds, because all results arrive at its end.
_MAX_SECONDS = 0.4
_MAX_STEPS = 256
# A size is tried only after a size that is at most this many times smaller.
_GROWTH = 4
# A size is built when this many times its savings so far equal its building time.
_FORESIGHT = 4
# One call in this many has another size, which keeps the averages of both sizes current.
_CALLS_PER_CHECK = 32
# `_WEIGHT` is the weight of a call in the average of its size. A call's time counts up to `_OUTLIER` averages.
_WEIGHT, _OUTLIER = 0.25, 4.0
# The maximum number of functions with known costs; the least recently used function is dropped.
_FUNCTIONS = 256


class FusionSizeModel:
    """The durations of each function's calls on one worker. Only one thread may use it.

    `limit` is the maximum number of steps in one call; None adapts the number to the duration of the steps.
    """

    def __init__(self, limit: int | None) -> None:
        self._limit = limit
        self._costs: OrderedDict[Hashable, _FunctionCost] = OrderedDict()

    def restart(self) -> None:
        """Notes that the worker is a new process, in which no function has run. The measured times are kept."""
        for cost in self._costs.values():
            cost.has_begun = False

    def steps(self, function: Hashable, available: int, ready: Mapping[int, float] | None = None) -> int:
        """Returns how many of the available steps of a function the next call makes, at least one.

        `ready` maps the built sizes above 1 to their building times in seconds; None if every size is ready.
        """
        wanted = self.wanted(function, available)
        if ready is None or wanted in ready:
            return wanted
        return max((size for size in ready if size <= wanted), default=1)

    def wanted(self, function: Hashable, available: int) -> int:
        """Returns the size of the next call if every size is ready."""
        cost = self._costs.get(function)
        if available < 2 or (cost is not None and cost.runs_alone):
            return 1
        if self._limit is not None:
            return self._limit if self._limit <= available else min(1 << (available.bit_length() - 1), self._limit)
        return 1 if cost is None else cost.next_size(available)

    def note_ready(self, function: Hashable, ready: Mapping[int, float]) -> None:
        """Notes the building times of ready sizes."""
        cost = self._costs.get(function)
        if cost is not None and ready:
            largest = max(ready)
            cost.building = ready[largest] / largest or cost.building

    def beyond_share(self, function: Hashable) -> int:
        """Returns how many steps beyond its share a worker may make in a call: they take as long as a call's overhead.

        Without these steps, the last of many steps would be made in ever smaller calls.
        """
        cost = self._costs.get(function)
        return 0 if cost is None or self._limit is not None else cost.steps_per_overhead()

    def record(self, function: Hashable, steps: int, seconds: float) -> None:
        """Records the duration of a successful call."""
        cost = self._costs.get(function) or self._new_cost(function)
        self._costs.move_to_end(function)
        cost.record(steps, seconds)

    def record_error(self, function: Hashable) -> None:
        """Records that a call of several steps failed with an error of its function."""
        cost = self._costs.get(function) or self._new_cost(function)
        cost.runs_alone = True

    def _new_cost(self, function: Hashable) -> "_FunctionCost":
        cost = self._costs[function] = _FunctionCost()
        if len(self._costs) > _FUNCTIONS:
            self._costs.popitem(last=False)
        return cost


@dataclasses.dataclass
class _FunctionCost:
    """The measured costs of one function.

    Attributes:
      runs_alone: whether the function never shares a call.
      known: the sizes that have run, smallest first.
      has_begun: whether the function has run in the worker's present process.
      average: size -> moving average of a call's seconds, without the first call in each process, which prepares it.
      latest: the last size above one that has run; 1 if none has.
      building: the building time of one more step, in seconds.
      wasted: the seconds that the size above the largest known size would have saved so far.
    """

    runs_alone: bool = False
    known: list[int] = dataclasses.field(default_factory=list)
    has_begun: bool = False
    average: dict[int, float] = dataclasses.field(default_factory=dict)
    latest: int = 1
    calls: int = 0
    building: float = 0.0
    wasted: float = 0.0

    def next_size(self, available: int) -> int:
        """Returns the size of the next call, which may not be built yet."""
        if 1 not in self.average or not self.has_begun:
            return 1
        wanted, _ = self._best()
        if self.latest > 1 and self.calls % _CALLS_PER_CHECK == 0:
            wanted = 1 if wanted > 1 else self.latest
        following = min(wanted, _GROWTH * self.known[-1])
        is_worth_it = _FORESIGHT * self.wasted >= following * self.building
        if self.known[-1] < following <= available and is_worth_it:
            return following
        limit = max(1, min(self._max_size(), available))
        possible = [size for size in self.known if size <= limit]
        # A known size above the wanted size costs no building time.
        return next((size for size in possible if size >= wanted), possible[-1])

    def record(self, steps: int, seconds: float) -> None:
        self.calls += 1
        if steps > 1:
            self.latest = steps
        if steps not in self.known:
            self.known = sorted([*self.known, steps])
            self.wasted = 0.0
        if not self.has_begun:
            self.has_begun = True
            # Half of the first call counts, because the call mostly waits for connections between servers.
            self.building = self.building or seconds / steps / 2
            return
        average = self.average.get(steps, seconds)
        self.average[steps] = average + _WEIGHT * (min(seconds, _OUTLIER * average) - average)
        if steps == self.known[-1] and 1 in self.average:
            best, overhead = self._best()
            following = min(best, _GROWTH * steps)
            if following > steps:
                self.wasted += overhead * (1 - steps / following)

    def steps_per_overhead(self) -> int:
        """Returns how many steps take as long as a call's overhead, at most `_MAX_STEPS`."""
        overhead, step = self._parts() if 1 in self.average else (0.0, 1.0)
        return int(min(overhead / step, _MAX_STEPS)) if step else _MAX_STEPS

    def _parts(self) -> tuple[float, float]:
        one = self.average[1]
        if self.latest not in self.average or self.latest == 1:
            return one, 0.0
        step = min(max(self.average[self.latest] - one, 0.0) / (self.latest - 1), one)
        return one - step, step

    def _best(self) -> tuple[int, float]:
        """Returns the best size, known or not, and the overhead of a call, in seconds."""
        if self.latest == 1:
            return (_GROWTH if _GROWTH * self.average[1] <= _MAX_SECONDS else 1), self.average[1]
        overhead, step = self._parts()
        if self.latest not in self.average:
            return self.latest, overhead
        # The size is rounded up to limit the overhead, but must not make the call too long.
        size = 1
        while size < _MAX_STEPS and size * step * _OVERHEAD < overhead * (1 - _OVERHEAD):
            size *= 2
        limit = self._max_size()
        while size > 1 and size > limit:
            size //= 2
        return size, overhead

    def _max_size(self) -> float:
        overhead, step = self._parts()
        return (_MAX_SECONDS - overhead) / step if step else math.inf
