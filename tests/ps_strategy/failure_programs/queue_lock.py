"""Prints which functions a thread calls while it holds the queue's lock, for every way to schedule functions."""

import inspect
import sys
import threading
from types import FrameType
from typing import Any

import numpy as np

_new_lock = threading.Lock
# These know which thread holds them.
queue_locks: list[Any] = []
modules: set[str] = set()


def new_lock() -> Any:
    if not inspect.currentframe().f_back.f_code.co_filename.endswith("closure_queue.py"):
        return _new_lock()
    queue_locks.append(threading.RLock())
    return queue_locks[-1]


def record(frame: FrameType, event: str, argument: Any) -> None:
    if not queue_locks or not queue_locks[0]._is_owned():  # noqa: SLF001 - no public name
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
