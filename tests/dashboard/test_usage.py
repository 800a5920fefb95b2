"""How busy what workers share was, from counts of made kernels."""

import dataclasses

import pytest

from coordinator.dashboard.snapshot import ServerUsage, UsageRecord

BEGIN = ServerUsage(
    "ps 0", 10.0, cpu=5.0, processors=2.0, machine="1f", host="a", machine_cpu=100.0, machine_processors=4
)


@pytest.fixture
def record() -> UsageRecord:
    record = UsageRecord()
    record.add([BEGIN])
    return record


def used(record: UsageRecord, **changes: float) -> dict[str, float]:
    record.add([dataclasses.replace(BEGIN, **changes)])
    return {resource.name: resource.share for resource in record.resources()}


def test_shares_are_of_the_processors_of_the_task_and_of_its_host(record: UsageRecord) -> None:
    assert record.resources() == ()
    assert used(record, time=12.0, cpu=7.0, machine_cpu=104.0) == {
        "parameter server 0": 0.5,
        "the processors of host a": 0.5,
    }


def test_tasks_on_one_host_share_its_processors_and_another_host_has_others(record: UsageRecord) -> None:
    client = dataclasses.replace(BEGIN, task="client", processors=1.0)
    other = dataclasses.replace(BEGIN, task="ps 1", machine="2e", host="b")
    record.add([client, other])
    record.add([dataclasses.replace(each, time=12.0, cpu=6.0, machine_cpu=108.0) for each in (client, other)])
    assert used(record, time=12.0, machine_cpu=108.0) == {
        "parameter server 0": 0.0,
        "the client": 0.5,
        "parameter server 1": 0.25,
        "the processors of host a": 1.0,
        "the processors of host b": 1.0,
    }


def test_shares_are_of_the_window_and_the_rows_of_the_page_of_the_latest_two(record: UsageRecord) -> None:
    record = UsageRecord(10.0)
    for second in range(0, 31, 2):
        # One processor for 20 s, then two.
        cpu = 5.0 + second + max(0, second - 20)
        record.add([dataclasses.replace(BEGIN, time=10.0 + second, cpu=cpu, machine_cpu=100.0 + 4 * second)])
    assert record.period() == (30.0, 40.0)
    assert record.resources()[0].share == pytest.approx(1.0)
    ((latest, before),) = record.pairs()
    assert (latest.time, before.time) == (40.0, 38.0)


def test_what_was_added_before_is_not_new_and_a_restarted_task_counts_from_zero(record: UsageRecord) -> None:
    assert not record.add([BEGIN])
    assert record.add([dataclasses.replace(BEGIN, time=12.0, cpu=0.5)])
    assert record.resources() == ()
