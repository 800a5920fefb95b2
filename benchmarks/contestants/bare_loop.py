"""No coordinator: a Python thread per worker calls the function on its device, as fast as it can.

The baseline for the cost of a coordinator. It detects no failures and retries nothing.
"""

import concurrent.futures
import contextlib
import itertools
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from benchmarks.contestants.side import DatasetFunction


class BareLoop:
    """See `Side`.

    Args:
      resolver: names the servers.
    """

    may_have_rules = False

    def __init__(self, resolver: Any) -> None:
        # A call then returns when the function has ended, not when it was sent.
        os.environ["TF_ENABLE_EAGER_CLIENT_STREAMING_ENQUEUE"] = "False"
        jobs = resolver.cluster_spec()
        tf.config.experimental_connect_to_cluster(
            resolver, job_name="chief", protocol="grpc", make_master_device_default=False
        )
        self._workers = [
            f"/job:worker/replica:0/task:{index}/device:CPU:0" for index in range(jobs.num_tasks("worker"))
        ]
        self._servers = itertools.cycle(
            f"/job:ps/replica:0/task:{index}/device:CPU:0" for index in range(jobs.num_tasks("ps"))
        )

    @contextlib.contextmanager
    def scope(self) -> Iterator[None]:
        """See `Side`."""

        def on_next_server(next_creator: Callable[..., Any], **kwargs: Any) -> Any:
            with tf.device(next(self._servers)):
                return next_creator(**kwargs)

        with tf.variable_creator_scope(on_next_server):
            yield

    def replicated(self, body: Callable[..., Any]) -> Callable[..., Any]:
        """See `Side`: the default strategy has a replica context."""
        return body

    def iterator(self, dataset_fn: DatasetFunction) -> Any:
        """See `Side`."""
        iterators = []
        for index, device in enumerate(self._workers):
            with tf.device(device):
                iterators.append(iter(dataset_fn(tf.distribute.InputContext(len(self._workers), index))))
        return OfEachWorker(iterators)

    def run(self, function: Any, args: Sequence[Any], count: int) -> None:
        """See `Side`."""
        left = threading.Semaphore(count)

        def run_on(index: int) -> None:
            while left.acquire(blocking=False):
                self._call_on(index, function, args)

        with concurrent.futures.ThreadPoolExecutor(len(self._workers)) as threads:
            # Raises what a thread raised.
            list(threads.map(run_on, range(len(self._workers))))

    def call(self, function: Any, args: Sequence[Any] = ()) -> Any:
        """See `Side`."""
        return self._call_on(0, function, args)

    def schedule(self, function: Any) -> Callable[[], Any]:
        """See `Side`: the returned function makes the call."""
        return lambda: self.call(function)

    def _call_on(self, index: int, function: Any, args: Sequence[Any]) -> Any:
        own = [arg.values[index] if isinstance(arg, OfEachWorker) else arg for arg in args]
        with tf.device(self._workers[index]):
            result = function(*own)
        return tf.nest.map_structure(lambda value: None if value is None else value.numpy(), result)


class OfEachWorker:
    """A value for each worker, by its index."""

    def __init__(self, values: Sequence[Any]) -> None:
        self.values = values
