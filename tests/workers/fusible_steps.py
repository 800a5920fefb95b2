"""Work that may be fused, and a gate that keeps it in the queue until a test opens it."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from coordinator.future import Future
from coordinator.runtime import FusionKey
from coordinator.testing.fake_runtime import FakeRuntime, Gate
from coordinator.workers.scheduler import Scheduler
from tests.deadline import LIMIT
from tests.fake_cluster import OPTIONS

FOUR = dataclasses.replace(OPTIONS, steps_per_dispatch=4)
SAME_KEY = FusionKey("step", ())


def behind_a_gate(scheduler: Scheduler, runtime: FakeRuntime, worker: int | None = 0) -> Gate:
    """Keeps a worker busy until the gate is opened, so that closures scheduled now wait in the queue."""
    gate = Gate(runtime)
    scheduler.schedule(gate, "gate", worker=worker)
    gate.wait_arrived()
    return gate


def schedule(scheduler: Scheduler, bodies: Sequence[Callable[[int], Any]], **settings: Any) -> list[Future]:
    return [scheduler.schedule(body, "step", fusion_key=SAME_KEY, **settings) for body in bodies]


def recorder(order: list[int], number: int) -> Callable[[int], int]:
    def body(_: int) -> int:
        order.append(number)
        return number

    return body


def results(futures: Sequence[Future]) -> list[Any]:
    return [future.result(LIMIT) for future in futures]
