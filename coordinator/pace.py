"""How many closures of one function are worth running in one call on one worker: a decision on values alone.

A call of k steps takes a + k * b seconds: a to bring it to the worker and its end back, b for each step. Both are
learned from the calls of one step and of k. As many steps are wanted as make a small beside k * b, but no more than
keep the call short.

Calls of each number of steps are made (traced, sent to the worker, prepared there) when they first run, which takes
long: about as long for each step as the function alone. So there are few such numbers, and a larger one is first tried
when it would already have saved a good part of what making it will take; training goes on for longer than it has.

Promise: what is not known to pay is not done. A function that failed in a call of several steps runs alone afterwards,
since all of that call had to be run again.
"""

import dataclasses
import math
from collections import OrderedDict
from collections.abc import Hashable

# What is not the steps' own may take this part of the time of a call.
_OVERHEAD = 0.025
# A call of several steps is to take no longer, in seconds: their results come all at its end.
_LONGEST = 0.4
# Beyond this the client is what takes the time.
_MOST = 64
# A size is tried after one that is at most so much smaller.
_GROWTH = 4
# A size is made when so many times what it would have saved until now is what making it takes.
_FORESIGHT = 4
# One call of so many is of another size, so that what is known of either does not grow old.
_CALLS_PER_LOOK = 32
# The weight of the latest call in what is known of its size, and how far above that it may lie and still count in full.
_WEIGHT, _OUTLIER = 0.25, 4.0
# What is known of more functions than this is forgotten, the one first that was not run for longest.
_FUNCTIONS = 256


class Pace:
    """Knows how long the calls of each function took on one worker. For one thread.

    Args:
      most: the most steps in one call; None adapts it to how long they take.
    """

    def __init__(self, most: int | None) -> None:
        self._most = most
        self._courses: OrderedDict[Hashable, _Course] = OrderedDict()

    def steps(self, function: Hashable, available: int) -> int:
        """How many steps the next call is to have, at least one, when so many are there to be run."""
        course = self._courses.get(function)
        if available < 2 or (course is not None and course.runs_alone):
            return 1
        if self._most is not None:
            return self._most if self._most <= available else min(_power_of_two(available), self._most)
        return 1 if course is None else course.steps(available)

    def note(self, function: Hashable, steps: int, seconds: float) -> None:
        """A call of so many steps went well and took so long."""
        self._course(function).note(steps, seconds)

    def note_error(self, function: Hashable) -> None:
        """A call of several steps failed by its function's own fault."""
        self._course(function).runs_alone = True

    def _course(self, function: Hashable) -> "_Course":
        course = self._courses.setdefault(function, _Course())
        self._courses.move_to_end(function)
        if len(self._courses) > _FUNCTIONS:
            self._courses.popitem(last=False)
        return course


@dataclasses.dataclass
class _Course:
    """What is known of one function.

    Attributes:
      runs_alone: whether it is never to run with others.
      made: the sizes that were run at least once, smallest first.
      usual: the usual seconds of a call, by its size; its first call, which makes it, left out.
      latest: the size above one that was run last; 1 before there was one.
      calls: how many there were.
      making: what it takes to make one step more, in seconds.
      wasted: the seconds that the size above the largest that is made would have saved so far.
    """

    runs_alone: bool = False
    made: list[int] = dataclasses.field(default_factory=list)
    usual: dict[int, float] = dataclasses.field(default_factory=dict)
    latest: int = 1
    calls: int = 0
    making: float = 0.0
    wasted: float = 0.0

    def steps(self, available: int) -> int:
        if 1 not in self.usual:
            return 1
        wanted = self._wanted()
        if self.latest > 1 and self.calls % _CALLS_PER_LOOK == 0:
            wanted = 1 if wanted > 1 else self.latest
        following = min(wanted, _GROWTH * self.made[-1])
        is_worth_it = _FORESIGHT * self.wasted >= following * self.making
        if self.made[-1] < following <= available and is_worth_it:
            return following
        most = min(self._longest(), available)
        possible = [size for size in self.made if size <= max(1, most)]
        # More than what is wanted costs nothing once it is made.
        return next((size for size in possible if size >= wanted), possible[-1])

    def note(self, steps: int, seconds: float) -> None:
        self.calls += 1
        if steps > 1:
            self.latest = steps
        if steps not in self.made:
            # What one step takes to make is mostly to get to know the servers: two more of it make four.
            self.making = seconds / steps if self.made else seconds / 2
            self.made = sorted([*self.made, steps])
            self.wasted = 0.0
            return
        usual = self.usual.get(steps, seconds)
        self.usual[steps] = usual + _WEIGHT * (min(seconds, _OUTLIER * usual) - usual)
        following = min(self._wanted(), _GROWTH * steps) if 1 in self.usual else steps
        if steps == self.made[-1] < following:
            overhead, _ = self._parts()
            self.wasted += overhead * (1 - steps / following)

    def _parts(self) -> tuple[float, float]:
        """What a call takes for itself, and what each of its steps takes, in seconds."""
        one = self.usual[1]
        if self.latest not in self.usual or self.latest == 1:
            return one, 0.0
        each = min(max(self.usual[self.latest] - one, 0.0) / (self.latest - 1), one)
        return one - each, each

    def _wanted(self) -> int:
        """The size that would be right if it were made."""
        if self.latest == 1:
            return _GROWTH if _GROWTH * self.usual[1] <= _LONGEST else 1
        if self.latest not in self.usual:
            return self.latest
        overhead, each = self._parts()
        # The next above what is wanted, so that the overhead is within its limit, unless the call would be too long.
        size = 1
        while size < _MOST and size * each * _OVERHEAD < overhead * (1 - _OVERHEAD):
            size *= 2
        longest = self._longest()
        while size > 1 and size > longest:
            size //= 2
        return size

    def _longest(self) -> float:
        """The size beyond which a call would take too long."""
        overhead, each = self._parts()
        return (_LONGEST - overhead) / each if each else math.inf


def _power_of_two(limit: int) -> int:
    return 1 << (limit.bit_length() - 1)
