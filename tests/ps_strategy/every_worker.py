"""Runs a function once on each worker; `schedule` alone leaves it to chance which worker runs what."""

from typing import Any

import coordinator
from coordinator.ps_strategy import tensorflow_internals
from coordinator.ps_strategy.calls.scheduled_call import ScheduledCall

# In seconds: a worker that was killed by the test may have to come back first.
TIMEOUT = 120.0


def on_every_worker(strategy: coordinator.ParameterServerStrategy, fn: Any, *args: Any) -> list[Any]:
    """What `fn(*args)` gives on each worker, by index; `fn` is traced as `schedule` would."""
    function = strategy._trace(fn, args, {})
    call = ScheduledCall(function, *tensorflow_internals.with_defaults(fn, args, {}))
    futures = [strategy.cluster.schedule_on(worker.index, call, function.name) for worker in strategy.cluster.workers]
    return [future.result(TIMEOUT) for future in futures]
