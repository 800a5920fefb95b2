"""Runs a function on each worker, and finds its trace and the copies of its resources."""

from typing import Any

import tensorflow as tf

import coordinator

# In seconds: a worker that was killed by the test may have to come back first.
TIMEOUT = 120.0


def on_every_worker(strategy: coordinator.ParameterServerStrategy, fn: Any, *args: Any) -> list[Any]:
    """Returns the results of `fn(*args)` on each worker, by index."""
    futures = [strategy.schedule(fn, args, worker=worker.index) for worker in strategy.cluster.workers]
    return [future.result(TIMEOUT) for future in futures]


def finish_own_work(strategy: coordinator.ParameterServerStrategy) -> None:
    """Returns when each worker has done the library's own work of earlier tests, which the statistics count as well.

    `join` does not wait for it: that each worker creates an iterator, for instance.
    """
    on_every_worker(strategy, tf.function(lambda: None))


def traced(strategy: coordinator.ParameterServerStrategy, fn: Any, *args: Any) -> Any:
    """Traces `fn(*args)` as `schedule` does, and returns the `TracedFunction`."""
    return strategy._tracer.trace(fn, args, {}, strategy.extended.scheduled_tracing)


def concrete_function(strategy: coordinator.ParameterServerStrategy, fn: Any, *args: Any) -> Any:
    """Traces `fn(*args)` as `schedule` does, and returns TensorFlow's concrete function."""
    return traced(strategy, fn, *args).concrete


def per_worker_handles(strategy: coordinator.ParameterServerStrategy) -> Any:
    """Returns the strategy's `PerWorkerHandles`."""
    return strategy._handles


def scheduler_of(strategy: coordinator.ParameterServerStrategy) -> Any:
    """Returns the strategy's `Scheduler`, with its queue and its parameter servers."""
    return strategy._scheduler


def builds_of(strategy: coordinator.ParameterServerStrategy) -> Any:
    """Returns what the strategy builds in the background."""
    return strategy.cluster._runtime.builds


def has_copies_on_workers(strategy: coordinator.ParameterServerStrategy, handle: Any) -> bool:
    """Returns True if a resource has a copy on the CPU of each worker."""
    copies = per_worker_handles(strategy).resource_for(handle).copies
    workers = strategy.cluster.workers
    return all(copies[worker.index].value.device == f"{worker.device}/device:CPU:0" for worker in workers)


def unhealthy(strategy: coordinator.ParameterServerStrategy) -> tuple[str, ...]:
    """Returns the names of the workers that cannot be given closures now."""
    return tuple(worker.device for worker in strategy.cluster.workers if not worker.healthy())
