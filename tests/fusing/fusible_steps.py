"""Work that may run in one call with others like it, and a cluster on which it waits until a test lets it run."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from coordinator.cluster import Cluster
from coordinator.future import Future
from coordinator.runtime import Likeness
from coordinator.testing.fake_runtime import FakeRuntime, Gate
from tests.deadline import LIMIT
from tests.fake_cluster import OPTIONS

FOUR = dataclasses.replace(OPTIONS, steps_per_dispatch=4)
LIKE_OTHERS = Likeness("step", ())


@dataclasses.dataclass
class Step:
    """Work like all other steps of its likeness."""

    body: Callable[[int], Any]
    likeness: Likeness | None = LIKE_OTHERS

    def __call__(self, worker: int) -> Any:
        return self.body(worker)


def behind_a_gate(cluster: Cluster, runtime: FakeRuntime, worker: int | None = 0) -> Gate:
    """Keeps a worker busy until the gate is opened, so that what is scheduled now waits for it."""
    gate = Gate(runtime)
    cluster.schedule(gate, "gate", worker=worker)
    gate.wait_arrived()
    return gate


def schedule(cluster: Cluster, bodies: Sequence[Callable[[int], Any]], **settings: Any) -> list[Future]:
    return [cluster.schedule(Step(body), "step", **settings) for body in bodies]


def recorder(order: list[int], number: int) -> Callable[[int], int]:
    def body(_: int) -> int:
        order.append(number)
        return number

    return body


def results(futures: Sequence[Future]) -> list[Any]:
    return [future.result(LIMIT) for future in futures]
