"""Whether a parameter server still has what was made there, on real servers."""

import pytest

from coordinator.ps_strategy.witness import Witness, Witnesses

PROGRAM = """
import coordinator
from coordinator.ps_strategy.witness import Witness, Witnesses
from coordinator.testing import LocalCluster

with LocalCluster(workers=1, ps=2) as cluster:
    strategy = coordinator.ParameterServerStrategy(cluster.resolver)
    devices = [server.device for server in strategy.parameter_servers]
    witnesses = Witnesses()
    assert witnesses.place({device: number for number, device in enumerate(devices)}) == set()
    cluster.restart("ps", 1)
    witnesses.question([0, 1])
    assert [witnesses.are_gone(number) for number in (0, 1)] == [False, True]
    cluster.kill("ps", 0)
    assert witnesses.place({devices[0]: 2}) == {devices[0]}
    # A call elsewhere in this thread is not harmed by what the witnesses met.
    assert not Witnesses().are_gone(0)
    strategy.close()
"""


@pytest.mark.long
@pytest.mark.cluster
def test_a_restarted_server_has_nothing_of_what_was_made_there(run_program):
    run_program(PROGRAM, timeout=200)


def test_a_server_that_goes_on_has_it_all(strategy):
    device = f"{strategy.parameter_servers[0].device}/device:CPU:0"
    assert Witness(device).is_there()
    witnesses = Witnesses()
    assert witnesses.place({strategy.parameter_servers[1].device: 7}) == set()
    witnesses.question([7])
    assert not witnesses.are_gone(7)
