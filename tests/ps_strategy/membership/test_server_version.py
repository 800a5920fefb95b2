"""Tests that a server of another TensorFlow version is detected, and refused or logged, as the options require."""

import re

import pytest
import tensorflow as tf

from coordinator.errors import VersionMismatchError
from coordinator.ps_strategy.membership import handshake
from coordinator.ps_strategy.membership.handshake import check_version, graph_version

DEVICES = ("/job:ps/replica:0/task:1", "/job:worker/replica:0/task:0")
ADDRESS = "10.0.0.1:2222"


@pytest.mark.parametrize(
    ("theirs", "difference"),
    [
        (2129, "an older TensorFlow (graph version 2129, not 2474)"),
        (2600, "a newer TensorFlow (graph version 2600, not 2474)"),
        (None, "another TensorFlow, whose graphs cannot be read here,"),
    ],
)
def test_two_versions_are_compared(monkeypatch, theirs, difference):
    monkeypatch.setattr(tf.version, "GRAPH_DEF_VERSION", 2474)
    monkeypatch.setattr(handshake, "graph_version", lambda device: theirs)
    with pytest.raises(VersionMismatchError, match=re.escape(f"runs {difference} than this program")):
        check_version(DEVICES[0], ADDRESS, is_error=True)


@pytest.mark.parametrize("device", DEVICES)
def test_a_server_of_another_version_is_an_error_or_a_warning(strategy, monkeypatch, caplog, device):
    assert graph_version(device) == tf.version.GRAPH_DEF_VERSION
    check_version(device, ADDRESS, is_error=True)
    assert not caplog.records
    monkeypatch.setattr(tf.version, "GRAPH_DEF_VERSION", tf.version.GRAPH_DEF_VERSION - 345)
    with pytest.raises(VersionMismatchError, match=r'newer TensorFlow .*Options\(version_mismatch="warn"\)') as caught:
        check_version(device, ADDRESS, is_error=True)
    assert f"{device} ({ADDRESS})" in str(caught.value)
    check_version(device, ADDRESS, is_error=False)
    [record] = caplog.records
    assert record.levelname == "WARNING"
    assert "runs a newer TensorFlow" in record.getMessage()


def test_a_server_that_cannot_write_the_test_graph_has_another_version(strategy, monkeypatch):
    def refuse(**_):
        raise tf.errors.NotFoundError(None, None, "Op type not registered 'DatasetToGraphV2'")

    monkeypatch.setattr(handshake.tf.raw_ops, "DatasetToGraphV2", refuse)
    assert graph_version(DEVICES[0]) is None


CONNECTING = """
    import logging

    import tensorflow as tf

    import coordinator
    from coordinator.testing import LocalCluster

    logging.basicConfig(format="%(levelname)s %(message)s")
    tf.version.GRAPH_DEF_VERSION -= 1
    with LocalCluster(workers=1, ps=1) as cluster:
        try:
            coordinator.ParameterServerStrategy(cluster.resolver)
        except coordinator.VersionMismatchError as error:
            print("refused:", error)
        options = coordinator.Options(version_mismatch="warn")
        with coordinator.ParameterServerStrategy(cluster.resolver, options=options) as strategy:
            print("taken:", strategy.schedule(tf.function(lambda: tf.constant(5))).result(60))
"""


@pytest.mark.long
@pytest.mark.cluster
def test_connecting_refuses_another_version_or_warns_of_each_server(run_program):
    ended = run_program(CONNECTING, timeout=200)
    assert "refused: /job:" in ended.stdout
    assert "taken: 5" in ended.stdout
    warned = re.findall(r"WARNING (/job:\S+) \(\S+\) runs a newer TensorFlow", ended.stderr)
    assert sorted(warned) == ["/job:ps/replica:0/task:0", "/job:worker/replica:0/task:0"]
