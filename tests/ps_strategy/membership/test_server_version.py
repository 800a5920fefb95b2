"""Tests that a server of another TensorFlow version is detected, and refused or logged, as the options require."""

import re

import pytest
import tensorflow as tf

from coordinator.errors import VersionMismatchError
from coordinator.ps_strategy.membership import handshake
from coordinator.ps_strategy.membership.handshake import check_version, graph_version

PS, WORKER = "/job:ps/replica:0/task:1", "/job:worker/replica:0/task:0"


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
        check_version(PS, "10.0.0.1:2222", is_error=True)


@pytest.mark.parametrize("device", [PS, WORKER])
def test_the_version_is_that_of_the_servers_tensorflow(strategy, device):
    assert graph_version(device) == tf.version.GRAPH_DEF_VERSION


def test_a_server_of_the_same_version_is_accepted_without_a_message(strategy, caplog):
    check_version(PS, "10.0.0.1:2222", is_error=True)
    assert not caplog.records


@pytest.fixture
def another_version(monkeypatch):
    """Makes this program report another TensorFlow version as its own."""
    number = tf.version.GRAPH_DEF_VERSION - 345
    monkeypatch.setattr(tf.version, "GRAPH_DEF_VERSION", number)
    return number


@pytest.mark.parametrize("device", [PS, WORKER])
def test_a_server_of_another_version_is_an_error_with_versions_and_advice(strategy, another_version, device):
    with pytest.raises(VersionMismatchError) as caught:
        check_version(device, "10.0.0.1:2222", is_error=True)
    assert str(caught.value) == (
        f"{device} (10.0.0.1:2222) runs a newer TensorFlow (graph version {another_version + 345}, not "
        f"{another_version}) than this program, which runs {tf.version.VERSION}. Install the same TensorFlow on both, "
        'or create the strategy with Options(version_mismatch="warn") to try it as it is.'
    )


def test_a_server_of_another_version_is_a_warning_if_so_configured(strategy, another_version, caplog):
    check_version(PS, "10.0.0.1:2222", is_error=False)
    [record] = caplog.records
    assert record.levelname == "WARNING"
    assert "runs a newer TensorFlow" in record.getMessage()


def test_a_server_that_cannot_write_the_test_graph_has_another_version(strategy, monkeypatch):
    def refuse(**_):
        raise tf.errors.NotFoundError(None, None, "Op type not registered 'DatasetToGraphV2'")

    monkeypatch.setattr(handshake.tf.raw_ops, "DatasetToGraphV2", refuse)
    assert graph_version(PS) is None
    with pytest.raises(VersionMismatchError, match="runs another TensorFlow, whose graphs cannot be read here, than"):
        check_version(PS, "10.0.0.1:2222", is_error=True)


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
        with coordinator.ParameterServerStrategy(
            cluster.resolver, options=coordinator.Options(version_mismatch="warn")
        ) as strategy:
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
