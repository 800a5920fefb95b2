"""Tests of a description of the cluster that is read again each time, from a function or a file."""

import json

import pytest

from coordinator.errors import ClusterSpecError
from coordinator.ps_strategy.membership.cluster_definition import PolledClusterResolver

CLUSTER = {"worker": ["w0:1"], "ps": ["p0:1"]}


def test_a_file_is_read_each_time(tmp_path):
    path = tmp_path / "cluster.json"
    path.write_text(json.dumps(CLUSTER))
    resolver = PolledClusterResolver(path)
    assert resolver.cluster_spec().as_dict() == CLUSTER
    assert resolver.worker_addresses() == ["w0:1"]
    path.write_text(json.dumps({**CLUSTER, "worker": ["w0:1", "w1:1"]}))
    assert resolver.worker_addresses() == ["w0:1", "w1:1"]


@pytest.mark.parametrize(
    ("later", "words"),
    [
        ({"ps": ["p0:1"]}, "no longer has a 'worker'"),
        ({"worker": ["w0:1"], "ps": ["p1:1"]}, "they hold the variables and cannot change"),
        ([], "A cluster is a dict of addresses by job"),
    ],
)
def test_a_description_that_is_not_valid_raises(later, words):
    descriptions = [later, CLUSTER]
    resolver = PolledClusterResolver(descriptions.pop)
    resolver.worker_addresses()
    with pytest.raises(ClusterSpecError, match=words):
        resolver.worker_addresses()


@pytest.mark.parametrize("text", [None, "{not json"])
def test_a_file_that_cannot_be_read_is_named(tmp_path, text):
    path = tmp_path / "cluster.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ClusterSpecError, match=r"cannot be read from .*cluster\.json"):
        PolledClusterResolver(path).cluster_spec()


def test_wrong_arguments_are_refused():
    with pytest.raises(TypeError, match="a function or the path of a JSON file"):
        PolledClusterResolver(3)
    with pytest.raises(ValueError, match="interval must be a positive number of seconds"):
        PolledClusterResolver(dict, interval=0)
