"""The decisions of the update rules, as functions of plain numbers.

The rules run these functions in their graphs, where AutoGraph converts the conditions. A simulator calls the functions
with Python numbers. So the functions use only arithmetic, comparisons and `if`: no libraries, no state.

A *version* is the number of updates applied; *staleness* is the version at the push minus the version at the pull. A
worker's *clock* is the number of steps that it has finished.
"""

from typing import Any


def staleness(version_at_push: Any, version_at_pull: Any) -> Any:
    """Returns the number of updates applied between a gradient's pull and its push."""
    return version_at_push - version_at_pull


def learning_rate_scale(staleness: Any) -> Any:
    """Returns the factor of a gradient's learning rate: 1 / staleness, or 1 for a fresh gradient (arXiv 1511.05950)."""
    return 1.0 if staleness <= 0 else 1.0 / float(staleness)


def is_accepted(version_at_push: Any, version_at_pull: Any, waiting: Any, grads_to_wait: int) -> Any:
    """Returns whether a synchronous rule accepts a gradient: its version is current, and the update is incomplete."""
    return (version_at_push == version_at_pull) & (waiting < grads_to_wait)


def is_complete(waiting: Any, grads_to_wait: int) -> Any:
    """Returns whether the waiting gradients are enough for an update."""
    return waiting >= grads_to_wait


def is_pull_due(steps_since_pull: Any, get_model_frequency: int) -> Any:
    """Returns whether a worker with a local model pulls the shared model before its next step."""
    return (steps_since_pull <= 0) | (steps_since_pull >= get_model_frequency)


def may_lead(clock: Any, slowest_clock: Any, max_lead: int) -> Any:
    """Returns whether a worker that begins a step will be at most `max_lead` steps ahead of the slowest after the step.

    `max_lead` is at least 1, so that the slowest worker may always begin a step. (SSP, Ho et al. 2013.)
    """
    # `slowest_clock + max_lead` could overflow. Both may be 2**62, the slowest clock if no other worker is active.
    return clock - slowest_clock < max_lead


def rejoined_clock(clock: Any, slowest_clock: Any) -> Any:
    """Returns the clock at which a worker joins, so that it need not catch up and the others need not wait for it.

    Args:
      clock: the joining worker's own clock.
      slowest_clock: the least clock of the active workers. If no worker is active, the greatest clock of all workers: a
        first worker that began below it would hold back all workers that join later.
    """
    return slowest_clock if slowest_clock > clock else clock


def may_start(pushes_before: Any, oldest_version: Any, grads_to_wait: int, max_delay: int) -> Any:
    """Returns whether a worker may begin a step so that no gradient becomes more than `max_delay` updates old.

    Args:
      pushes_before: the number of gradients that are pushed or in flight; all may be pushed before the new gradient.
      oldest_version: the oldest version that the new gradient or a gradient in flight is computed on.
      grads_to_wait: the number of gradients in an update.
      max_delay: the largest number of updates between a gradient's pull and its push.
    """
    return pushes_before // grads_to_wait - oldest_version <= max_delay


def is_delay_over(now: Any, pushed_at: Any, delay: Any) -> Any:
    """Returns whether a pull that begins now applies a delayed gradient; all arguments are in the same unit of time.

    (Asynchronous Deep Learning Test-bed to Analyze Gradient Staleness Effect: t0 - delay > ti.)
    """
    return now - delay > pushed_at


def is_average_due(seconds_since: Any, period: float, steps: Any, warmup_steps: int) -> Any:
    """Returns whether a worker's model is averaged with the other models during the worker's next step."""
    return (steps >= warmup_steps) & (seconds_since >= period)
