"""What stands out in a result, in words: why it is so, and which setting to try."""

import math
from collections.abc import Iterator

from coordinator.simulation.result import Result
from coordinator.simulation.rules.bounded_delay import BoundedDelay
from coordinator.simulation.rules.stale_synchronous import StaleSynchronous

# From where on a share stands out.
_MUCH = 0.3
_NEARLY_ALL = 0.9


def advice(result: Result) -> tuple[str, ...]:
    """Sentences about one result; none where nothing stands out."""
    return tuple(_noticed(result))


def _noticed(result: Result) -> Iterator[str]:
    rule, workers = result.setting.rule, result.setting.workers
    if isinstance(rule, BoundedDelay) and result.idle_share > _MUCH and rule.max_delay < math.inf:
        most = (int(rule.max_delay) + 1) * rule.grads_to_wait
        if most < workers:
            yield (
                f"max_delay counts updates, grads_to_wait is {rule.grads_to_wait}: so at most {most} of {workers} "
                f"workers can be under way. With --grads-to-wait workers it counts rounds of all workers."
            )
        else:
            yield f"Workers wait {result.idle_share:.0%} of their time for the slowest: try a larger --max-delay."
    if isinstance(rule, StaleSynchronous) and result.idle_share > _MUCH:
        yield (
            f"Workers wait {result.idle_share:.0%} of their time for the slowest: with a lead of at most "
            f"{rule.max_lead} steps all end up at its pace. A larger --max-lead only puts that off."
        )
    if result.rejected_share > _MUCH:
        yield (
            f"{result.rejected_share:.0%} of all gradients were computed for nothing: try fewer --grads-to-wait, or "
            f"a rule that rejects none."
        )
    if result.queue.utilization > _NEARLY_ALL:
        yield (
            f"The parameter servers are busy {result.queue.utilization:.0%} of the time: more workers bring nothing. "
            f"Try more --ps, or larger minibatches."
        )
