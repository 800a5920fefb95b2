"""Tests of when the copies of a per-worker resource are created, and of their handles, without servers."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import tensorflow as tf

from coordinator import ClosureCancelledError, ClosureInputError
from coordinator.ps_strategy.per_worker.resource import PerWorkerResource, WorkerCopies
from coordinator.testing.fake_runtime import FakeRuntime, Gate
from tests.deadline import LIMIT
from tests.fake_cluster import OPTIONS, running_scheduler
from tests.ps_strategy.local_context import local_context


class Workshop:
    """Builds copies, and records for which worker and connection."""

    def __init__(self):
        self.built_for = []
        self.error = None

    def build(self, worker_context):
        self.built_for.append((worker_context.index, worker_context.connection_number))
        if self.error is not None:
            raise self.error
        return f"copy {len(self.built_for)}"


@pytest.fixture
def workshop():
    return Workshop()


@pytest.fixture
def resource(workshop):
    return PerWorkerResource("vocabulary", workshop.build)


def test_a_copy_is_created_once_per_worker_and_connection_when_it_is_used(workshop, resource):
    assert workshop.built_for == []
    found = [resource.value_on(local_context(*where)) for where in ((0, 1), (1, 1), (0, 1), (1, 1), (0, 2), (0, 2))]
    assert found == ["copy 1", "copy 2", "copy 1", "copy 2", "copy 3", "copy 3"]
    assert workshop.built_for == [(0, 1), (1, 1), (0, 2)]
    constant = PerWorkerResource("constant", lambda _: tf.constant(1))
    assert constant.value_on(local_context()).device.endswith("/device:CPU:0"), "in the device scope of its worker"


def test_a_copy_is_created_again_after_it_was_reset(workshop, resource):
    resource.value_on(local_context(0))
    resource.recreate_on(local_context(1))
    assert workshop.built_for == [(0, 1)], "there is none to be created again"
    resource.recreate()
    assert [resource.value_on(local_context(0)) for _ in range(2)] == ["copy 2", "copy 2"]
    resource.recreate_on(local_context(0))
    assert resource.value_on(local_context(0)) == "copy 3"


def test_a_copy_that_cannot_be_created_is_an_input_error_with_its_cause(workshop, resource):
    workshop.error = tf.errors.NotFoundError(None, None, "no such file")
    with pytest.raises(
        ClosureInputError, match=r"vocabulary could not be created on /device:CPU:0: NotFoundError: no such file"
    ) as caught:
        resource.value_on(local_context())
    assert caught.value.__cause__ is workshop.error
    # Errors of this library are passed on as they are.
    for workshop.error in (ClosureCancelledError("stop"), ClosureInputError("table could not be made")):
        with pytest.raises(type(workshop.error)) as caught:
            resource.value_on(local_context())
        assert caught.value is workshop.error
    workshop.error = None
    assert resource.value_on(local_context()) == "copy 4", "it is tried again"


def test_work_on_all_workers_ends_when_a_parameter_server_is_lost():
    runtime = FakeRuntime(workers=2)
    with running_scheduler(runtime) as scheduler, ThreadPoolExecutor(1) as pool:
        scheduler.recovery.recover_with(lambda: False)
        gate = Gate(runtime)
        saving = pool.submit(WorkerCopies(scheduler, OPTIONS).run_on_live, gate, "save their positions")
        gate.wait_arrived()
        runtime.lose_parameter_server()
        # The caller holds what the recovery needs.
        with pytest.raises(tf.errors.UnavailableError, match="before every worker could save their positions"):
            saving.result(LIMIT)
