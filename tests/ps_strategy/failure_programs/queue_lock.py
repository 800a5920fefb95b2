"""Records which modules' functions are called by a thread while it holds the queue's lock, and prints the names.

Functions are scheduled in all possible ways: alone and fused, with arrays, tensors, keyword arguments,
iterators and futures, failing and cancelled. In the end the recorder itself is checked.
"""

import inspect
import sys
import threading
from types import FrameType
from typing import Any

import numpy as np

_new_lock = threading.Lock


class OwnedLock:
    """A lock that knows which thread holds it."""

    def __init__(self) -> None:
        self._lock = _new_lock()
        self.owner: int | None = None

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        acquired = self._lock.acquire(blocking, timeout)
        if acquired:
            self.owner = threading.get_ident()
        return acquired

    def release(self) -> None:
        self.owner = None
        self._lock.release()

    __enter__ = acquire

    def __exit__(self, *_: object) -> None:
        self.release()


queue_locks: list[OwnedLock] = []
modules: set[str] = set()


def new_lock() -> Any:
    if not inspect.currentframe().f_back.f_code.co_filename.endswith("closure_queue.py"):
        return _new_lock()
    queue_locks.append(OwnedLock())
    return queue_locks[-1]


def record(frame: FrameType, event: str, argument: Any) -> None:
    if not queue_locks or queue_locks[0].owner != threading.get_ident():
        return
    if event == "call":
        modules.add(str(frame.f_globals.get("__name__")))
    elif event == "c_call":
        modules.add(str(getattr(argument, "__module__", None)))


def main() -> None:
    import tensorflow as tf

    import coordinator
    from coordinator.testing import LocalCluster

    with LocalCluster(workers=1, ps=1) as cluster:
        threading.Lock = new_lock  # type: ignore[assignment]
        threading.setprofile(record)
        sys.setprofile(record)
        options = coordinator.Options(steps_per_dispatch=4, stop_on_error=False)
        with coordinator.ParameterServerStrategy(cluster.resolver, options=options) as strategy:
            threading.Lock = _new_lock

            add = tf.function(lambda x, y=1.0: x + y)
            take = tf.function(lambda iterator: next(iterator))  # noqa: PLW0108 - a builtin has no signature
            fail = tf.function(lambda x: tf.debugging.check_numerics(x, "bad"))
            iterator = iter(strategy.experimental_distribute_dataset(tf.data.Dataset.range(10).repeat()))
            for _ in range(6):
                for x in (np.ones(3, np.float32), tf.ones(3), tf.constant(1.0)):
                    strategy.schedule(add, (x,))
                strategy.schedule(add, (tf.constant(1.0),), {"y": tf.constant(2.0)})
                strategy.schedule(take, (iterator,))
                strategy.schedule(add, (strategy.schedule(add, (tf.constant(1.0),)),))
                strategy.schedule(fail, (tf.constant(float("nan")),))
                strategy.schedule(add, (tf.constant(1.0),), timeout=60.0).cancel()
            strategy.join(120)
        sys.stdout.write(f"{' '.join(sorted(modules - {'None'}))}\n")
        with queue_locks[0]:
            tf.nest.flatten([1])
        assert any(module.startswith("tensorflow") for module in modules), "The recorder records nothing."


if __name__ == "__main__":
    main()
