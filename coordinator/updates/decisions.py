"""What the update rules decide, as functions of plain numbers.

Each decision is written once. The rules run it inside their graphs, where AutoGraph turns its conditions into graph
operations; a simulator calls the same function with Python numbers. So it may use arithmetic, comparisons and `if`, and
nothing else: no libraries, no state.

Words: a *version* is the number of updates that were applied; *staleness* is the version at the push less the version
at the pull. A worker's *clock* is the number of steps that it has finished.
"""

from typing import Any


def staleness(version_at_push: Any, version_at_pull: Any) -> Any:
    """How many updates were applied between the pull of a gradient's model and the push of the gradient."""
    return version_at_push - version_at_pull


def learning_rate_scale(staleness: Any) -> Any:
    """What a stale gradient's learning rate is multiplied by: 1 / staleness, 1 for a fresh one (arXiv 1511.05950)."""
    return 1.0 if staleness <= 0 else 1.0 / float(staleness)


def is_accepted(version_at_push: Any, version_at_pull: Any, waiting: Any, grads_to_wait: int) -> Any:
    """Whether a synchronous rule takes a gradient: it is of the present version, which still waits for gradients."""
    return (version_at_push == version_at_pull) & (waiting < grads_to_wait)


def is_complete(waiting: Any, grads_to_wait: int) -> Any:
    """Whether the gradients that wait make an update."""
    return waiting >= grads_to_wait


def is_pull_due(steps_since_pull: Any, get_model_frequency: int) -> Any:
    """Whether a worker that keeps a local model is to pull the shared one before its next step."""
    return (steps_since_pull <= 0) | (steps_since_pull >= get_model_frequency)


def may_lead(clock: Any, slowest_clock: Any, max_lead: int) -> Any:
    """Whether a worker may begin a step, so that it never has finished over `max_lead` more than the slowest.

    `max_lead` is at least 1, so that the slowest worker always may. (SSP, Ho et al. 2013.)
    """
    # `slowest_clock + max_lead` would overflow: without other workers the slowest clock is 2**62, and `max_lead` may be
    # as large.
    return clock - slowest_clock < max_lead


def rejoined_clock(clock: Any, slowest_clock: Any) -> Any:
    """The clock of a worker that comes (back): it does not have to catch up, nor do the others wait for that."""
    return slowest_clock if slowest_clock > clock else clock


def may_start(pushes_before: Any, oldest_version: Any, grads_to_wait: int, max_delay: int) -> Any:
    """Whether one more gradient may be begun so that none will be more than `max_delay` updates old.

    Args:
      pushes_before: gradients that were pushed or are under way; all of them may be pushed before the new one.
      oldest_version: the oldest version that a gradient under way, or the new one, is computed on.
      grads_to_wait: gradients per update.
      max_delay: the most updates that may lie between a gradient's pull and its push.
    """
    return pushes_before // grads_to_wait - oldest_version <= max_delay


def is_delay_over(now: Any, pushed_at: Any, delay: Any) -> Any:
    """Whether a pull that begins now is to apply a gradient whose push was delayed; all three in the same unit of time.

    (Asynchronous Deep Learning Test-bed to Analyze Gradient Staleness Effect: t0 - delay > ti.)
    """
    return now - delay > pushed_at


def is_average_due(seconds_since: Any, period: float, steps: Any, warmup_steps: int) -> Any:
    """Whether a worker's model is to be averaged with the others' beside its next step."""
    return (steps >= warmup_steps) & (seconds_since >= period)
