"""How many runs of one closure are divided into parts: closures of consecutive runs with one `RunsFuture`.

    waits              8 runs
    a worker starts    4 runs | 4 runs             a share of them
    its call begins    0 1 | 6 runs                as many as it is to make; they have numbers now
    the call is lost   0 1 | 2 3 | 4 runs          these two wait again, to run one by one; 2 3 run elsewhere

Functions of closures; after `prepare` they are called with the queue's lock held.
"""

from collections.abc import Sequence

from coordinator.queueing.closure import Attempt, Closure, ClosureState
from coordinator.runs_future import RunsPart
from coordinator.runtime import FusionKey


def prepare(closure: Closure, fusion_key: FusionKey | None) -> None:
    """Prepares a closure for many runs, before it is queued.

    Args:
      closure: the closure.
      fusion_key: of its work; None if each run is a separate call.
    """
    whole = closure.whole
    assert whole is not None
    whole.parts[closure] = None
    whole.rest = closure
    if fusion_key is not None and closure.timeout is None:
        # Another one than that of single runs, which are not gathered with these.
        closure.fusion_key = whole.fusion_key = FusionKey(fusion_key.function, object())


def split_runs(closure: Closure, workers: int) -> Closure | None:
    """Leaves a closure that a worker is about to start a share of its runs, as large as that of any other worker.

    Args:
      closure: waited.
      workers: how many workers there are.

    Returns:
      A new closure of the other runs; None if there are none.
    """
    whole = closure.whole
    if whole is None or whole.rest is not closure:
        return None
    whole.rest = None
    if closure.target is not None:
        return None
    return _split(closure, 1 if closure.timeout is not None else -(-closure.runs // max(workers, 1)))


def available(attempt: Attempt) -> int:
    """Returns how many runs an attempt may make: those of its closure, and those that no worker has taken."""
    closure, whole = attempt.closure, attempt.closure.whole
    if whole is None or whole.rest is None or _is_numbered(closure) or closure.timeout is not None:
        return closure.runs
    return closure.runs + int(whole.rest.runs)


def number(attempt: Attempt, count: int) -> Closure | None:
    """Gives the first runs of a closure, at most as many as are `available`, their numbers, as their call begins.

    Args:
      attempt: makes these runs.
      count: how many.

    Returns:
      The closure of the runs that are left, which has become larger or smaller unless it is a new one; None if there
      is none, or the numbers were given to an earlier attempt.
    """
    closure, part = attempt.closure, attempt.closure.future
    assert isinstance(part, RunsPart)
    if _is_numbered(closure):
        others = _split(closure, count)
        if others is not None:
            # They were in the same attempts before this one.
            others.attempts, others.failures = attempt.number - 1, closure.failures
            others.lost_on, others.needs_another = closure.lost_on, closure.needs_another
        return others
    part.first = part.whole.begun
    part.whole.begun += count
    rest: Closure | None = part.whole.rest
    if rest is None or part.runs == count:
        return _split(closure, count)
    assert isinstance(rest.future, RunsPart)
    rest.future.runs += part.runs - count
    part.runs = count
    if not rest.runs:
        part.whole.rest = None
        del part.whole.parts[rest]
    return rest


def _is_numbered(closure: Closure) -> bool:
    return isinstance(closure.future, RunsPart) and closure.future.first >= 0


def _split(closure: Closure, at: int) -> Closure | None:
    """Leaves a closure its first `at` runs; returns a new one of the others, if there are any."""
    part = closure.future
    assert isinstance(part, RunsPart)
    if at >= part.runs:
        return None
    is_numbered = _is_numbered(closure)
    others = RunsPart(part.whole, part.runs - at, part.first + at if is_numbered else -1)
    part.runs = at
    rest = Closure(closure.work, closure.name, closure.number, others, target=closure.target, timeout=closure.timeout)
    rest.inputs, rest.fusion_key = closure.inputs, closure.fusion_key
    part.whole.parts[rest] = None
    if not is_numbered:
        part.whole.rest = rest
    return rest


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
