"""Tests that no fault of a link of the network ends a training, and that each example counts once in spite of it."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.deadline import wait_until
from tests.network import training
from tests.network.lab import Fault, Lab

pytestmark = [pytest.mark.release, pytest.mark.timeout(1800)]

HOSTS = ["c", "w0", "w1", "p0", "p1"]
CLUSTER = {"worker": ["w0", "w1"], "ps": ["p0", "p1"]}
LINKS = {
    "client and worker": ("c", "w0"),
    "client and ps": ("c", "p1"),
    "worker and ps": ("w0", "p1"),
    "ps": ("p0", "p1"),
}
# Those that last.
LASTING = [Lab.drop, Lab.reject, Lab.drop_one_way, Lab.lose]
AT_ONCE = [Lab.reset, Lab.half_open]
# In seconds: longer than `heartbeat_timeout`, and than workers take to be asked for their links.
HOLD, LIMIT = 10, 300.0
LOG = "client.log"


class Training:
    """The training in a lab."""

    def __init__(self, lab: Lab, folder: Path) -> None:
        self.lab = lab
        self.client = lab.train(LOG, training.__file__, str(folder), cluster=CLUSTER)

    def seconds(self) -> list[list[int]]:
        """Returns how many functions each worker has finished in each second."""
        found = re.findall(r"^progress (\d+) (\d+)$", self.lab.printed(LOG), re.MULTILINE)
        return [[int(first), int(second)] for first, second in found]

    def wait_steady(self) -> None:
        """Waits until both workers have finished functions in two seconds in a row from now on."""
        begin = len(self.seconds())

        def is_steady() -> bool:
            assert self.client.poll() is None, self.lab.printed(LOG)
            latest = self.seconds()[begin + 1 :][-2:]
            return len(latest) == 2 and all(map(all, latest))

        wait_until(is_steady, LIMIT)

    def wait_seconds(self, count: int) -> None:
        """Waits while the client reports for some seconds."""
        end = len(self.seconds()) + count
        wait_until(lambda: len(self.seconds()) >= end or self.client.poll() is not None, LIMIT)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Training]:
    """One training, which goes on through all faults; afterwards its counts must be exact."""
    folder = tmp_path_factory.mktemp("network")
    with Lab(HOSTS, folder) as lab:
        for job, hosts in CLUSTER.items():
            for index, host in enumerate(hosts):
                lab.serve(host, job, index)
        running = Training(lab, folder / "checkpoints")
        running.wait_steady()
        yield running
        lab.heal()
        running.client.communicate(timeout=LIMIT)
        answer = json.loads(lab.printed(LOG).splitlines()[-1])
        assert answer["wrong"] == [0, 0]
        assert answer["epochs"] > 0


@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize("fault", [*LASTING, *AT_ONCE], ids=lambda fault: fault.__name__)
def test_training_goes_on_after_a_fault_of_a_link(run: Training, fault: Fault, link: str) -> None:
    ends = LINKS[link]
    for one, other in (ends, ends[::-1]) if fault in (Lab.drop_one_way, Lab.half_open) else (ends,):
        fault(run.lab, one, other)
        if fault in LASTING:
            run.wait_seconds(HOLD)
            run.lab.heal()
        run.wait_steady()


def test_a_worker_without_a_parameter_server_leaves_the_others_their_work(run: Training) -> None:
    before = len(run.seconds())
    run.lab.drop("w0", "p1")
    try:
        run.wait_seconds(40)
        assert any(second for _, second in run.seconds()[before + 20 :])
    finally:
        run.lab.heal()
    run.wait_steady()
