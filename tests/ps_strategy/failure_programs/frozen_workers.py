"""A client whose workers freeze, one after the other: their functions run elsewhere, and no other worker pauses.

It prints one JSON object: for each freeze, how many functions the other workers finished in equal times before and
after it, and the counts at the end.
"""

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import tensorflow as tf

import coordinator
from coordinator.testing import LocalCluster
from tests.deadline import wait_until
from tests.ps_strategy.every_worker import unhealthy

TIMEOUT = 120.0
FREEZES = 10
WORKERS = 3
# In seconds: much longer than one function, and so short that it ends before the freeze is detected.
WINDOW = 0.6


class Load:
    """Keeps the workers busy, and counts what each has finished."""

    def __init__(self, strategy: coordinator.ParameterServerStrategy) -> None:
        self._strategy = strategy
        self._stop = threading.Event()
        self.scheduled = 0
        with strategy.scope():
            self.count = count = tf.Variable(0, dtype=tf.int64)

        @tf.function
        def step() -> tf.Tensor:
            return count.assign_add(1)

        self.step = step

    def finished_besides(self, worker: int) -> int:
        """Returns how many functions the other workers have finished."""
        return sum(each.finished for each in self._strategy.cluster.statistics().workers if each.index != worker)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Keeps scheduling during the block, never far ahead."""
        thread = threading.Thread(target=self._run)
        thread.start()
        try:
            yield
        finally:
            self._stop.set()
            thread.join()
            self._strategy.join(TIMEOUT)

    def _run(self) -> None:
        while not self._stop.is_set():
            futures = [self._strategy.schedule(self.step) for _ in range(60)]
            self.scheduled += len(futures)
            # The function on the frozen worker is not awaited.
            wait_until(lambda made=futures: sum(future.done() for future in made) > 40)


def freeze(cluster: LocalCluster, strategy: coordinator.ParameterServerStrategy, load: Load, victim: int) -> dict:
    """Freezes one worker while all are busy, until its function has run elsewhere; then thaws it."""

    def finished_in_window() -> int:
        before = load.finished_besides(victim)
        threading.Event().wait(WINDOW)
        return load.finished_besides(victim) - before

    losses = strategy.cluster.statistics().workers[victim].losses
    rate_before = finished_in_window()
    cluster.freeze("worker", victim)
    start = time.monotonic()
    rate_after = finished_in_window()
    wait_until(lambda: strategy.cluster.statistics().workers[victim].losses > losses)
    noticed = time.monotonic() - start
    assert unhealthy(strategy) == (strategy.cluster.workers[victim].device,)
    cluster.thaw("worker", victim)
    finished = strategy.cluster.statistics().workers[victim].finished
    wait_until(lambda: strategy.cluster.statistics().workers[victim].finished > finished)
    return {"before": rate_before, "after": rate_after, "noticed": noticed}


def main() -> None:
    # One at a time, so that the cost of each freeze can be measured.
    options = coordinator.Options(heartbeat_interval=0.2, heartbeat_timeout=1.5, steps_per_dispatch=1)
    with (
        LocalCluster(workers=WORKERS, ps=1) as cluster,
        coordinator.ParameterServerStrategy(cluster.resolver, options=options) as strategy,
    ):
        load = Load(strategy)
        strategy.schedule(load.step).result(TIMEOUT)
        with load.running():
            wait_until(lambda: all(worker.finished > 20 for worker in strategy.cluster.statistics().workers))
            freezes = [freeze(cluster, strategy, load, number % WORKERS) for number in range(FREEZES)]
        statistics = strategy.cluster.statistics()
        answer = {
            "freezes": freezes,
            "scheduled": load.scheduled + 1,
            "finished": statistics.finished,
            "retried": statistics.retried,
            "count": int(load.count.numpy()),
        }

        # With one frozen for good: join and close do not wait for it.
        cluster.freeze("worker", 0)
        futures = [strategy.schedule(load.step) for _ in range(30)]
        strategy.join(TIMEOUT)
        answer["results while frozen"] = sum(future.exception(timeout=0) is None for future in futures)
        strategy.close()
        cluster.thaw("worker", 0)
    print(json.dumps(answer))  # noqa: T201 - its answer


if __name__ == "__main__":
    main()
