"""How busy what workers share was, from counts of made kernels."""

import dataclasses

import pytest

from coordinator.dashboard.usage import ServerUsage, UsageRecord

BEGIN = ServerUsage("ps 0", 10.0, cpu=5.0, processors=2.0, machine="a", machine_cpu=100.0, machine_processors=4)


@pytest.fixture
def record() -> UsageRecord:
    record = UsageRecord()
    record.add([BEGIN])
    return record


def used(record: UsageRecord, **changes: float) -> dict[str, float]:
    record.add([dataclasses.replace(BEGIN, **changes)])
    return {resource.name: resource.share for resource in record.resources()}


def test_shares_are_of_the_processors_of_the_task_and_of_its_machine(record: UsageRecord) -> None:
    assert record.resources() == ()
    assert used(record, time=12.0, cpu=8.0, machine_cpu=104.0) == {
        "parameter server 0": 0.75,
        "the machine of parameter server 0": 0.5,
    }


def test_tasks_on_one_machine_share_it_and_the_client_has_its_name(record: UsageRecord) -> None:
    client = dataclasses.replace(BEGIN, task="client", processors=1.0)
    record.add([client])
    record.add([dataclasses.replace(client, time=12.0, cpu=6.0)])
    assert set(used(record, time=12.0)) == {"parameter server 0", "the machine of parameter server 0", "the client"}


def test_what_was_added_before_is_not_new_and_a_restarted_task_counts_from_zero(record: UsageRecord) -> None:
    assert not record.add([BEGIN])
    assert record.add([dataclasses.replace(BEGIN, time=12.0, cpu=0.5)])
    assert record.resources() == ()
