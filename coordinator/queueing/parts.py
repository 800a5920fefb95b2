"""How many runs of one closure are divided into parts: closures of consecutive runs with one `RunsFuture`.

    waits              0 1 2 3 4 5 6 7
    a worker starts    0 1 | 2 3 4 5 6 7       its share runs, the others wait at the front
    a call has ended   0 . 1 | 2 3 ...         0 has its result; a loss would have 1 made again

Functions of closures; after `begin` they are called with the queue's lock held.
"""

from collections.abc import Sequence

from coordinator.queueing.closure import Closure, ClosureState
from coordinator.runs_future import RunsPart
from coordinator.runtime import FusionKey

# A worker takes a share of the runs that wait, such that all workers together would take that many shares.
_SHARES_PER_WORKER = 2


def begin(closure: Closure, fusion_key: FusionKey | None) -> None:
    """Prepares a closure for many runs, before it is queued.

    Args:
      closure: the closure.
      fusion_key: of its work; None if each run is a separate call.
    """
    whole = closure.whole
    assert whole is not None
    whole.parts[closure] = None
    if fusion_key is not None and closure.timeout is None:
        # Another one than that of single runs, which are not gathered with these.
        closure.fusion_key = whole.fusion_key = FusionKey(fusion_key.function, object())


def share(closure: Closure, workers: int) -> int:
    """Returns how many of its runs a worker takes: the fewer are left the fewer, so that all workers end together.

    Args:
      closure: waits.
      workers: how many workers there are.
    """
    if closure.timeout is not None:
        return 1
    if closure.attempts or closure.target is not None:
        return closure.runs
    return -(-closure.runs // (_SHARES_PER_WORKER * max(workers, 1)))


def split(closure: Closure, at: int) -> Closure:
    """Leaves a closure its first `at` runs; returns a new one of the others, which were not tried."""
    part = closure.future
    assert isinstance(part, RunsPart)
    others = RunsPart(part.whole, part.first + at, part.runs - at)
    part.runs = at
    rest = Closure(closure.work, closure.name, closure.number, others, target=closure.target, timeout=closure.timeout)
    rest.inputs, rest.fusion_key = closure.inputs, part.whole.fusion_key
    part.whole.parts[rest] = None
    return rest


def advance(closure: Closure, count: int) -> int:
    """Drops the first `count` runs of a closure, which have ended; returns the number of the first of them."""
    part = closure.future
    assert isinstance(part, RunsPart)
    part.first += count
    part.runs -= count
    return part.first - count


def take_siblings(closure: Closure) -> Sequence[Closure]:
    """Returns the other parts of the same runs, which end with a closure that has just ended; none if it is done."""
    if closure.whole is None:
        return ()
    parts = closure.whole.parts
    parts.pop(closure, None)
    if closure.state is ClosureState.DONE:
        return ()
    siblings = tuple(parts)
    parts.clear()
    return siblings
