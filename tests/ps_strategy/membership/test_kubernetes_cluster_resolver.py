"""Tests of the resolver that follows pods: what it takes from TF_CONFIG, and what from Kubernetes."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

import coordinator
from coordinator.errors import ClusterSpecError
from coordinator.launch.kubernetes_manifests import KubernetesJob
from tests.ps_strategy.membership.fake_kubernetes import FakeKubernetes, pod


@pytest.fixture
def kubernetes() -> Iterator[FakeKubernetes]:
    with FakeKubernetes() as kubernetes:
        yield kubernetes


@pytest.fixture
def resolver(
    kubernetes: FakeKubernetes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> coordinator.KubernetesClusterResolver:
    """The resolver of the program in the pod that the manifests describe."""
    program = KubernetesJob(name="digits", image="image", workers=2, ps=2).objects()[-1]
    (container,) = program["spec"]["template"]["spec"]["containers"]
    (text,) = [variable["value"] for variable in container["env"] if variable["name"] == "TF_CONFIG"]
    monkeypatch.setenv("TF_CONFIG", text)
    return coordinator.KubernetesClusterResolver(api_server=kubernetes.url, credentials=tmp_path)


def address(index: int) -> str:
    return f"digits-worker-{index}.digits:2222"


def test_the_workers_are_the_pods_and_all_else_is_of_tf_config(
    kubernetes: FakeKubernetes, resolver: coordinator.KubernetesClusterResolver
) -> None:
    others = {"chief": ["digits-chief.digits:2222"], "ps": ["digits-ps-0.digits:2222", "digits-ps-1.digits:2222"]}
    assert resolver.cluster_spec().as_dict() == {**others, "worker": [address(0), address(1)]}
    for index in (2, 0, 5):
        kubernetes.put(pod(index))
    assert resolver.cluster_spec().as_dict() == {**others, "worker": {index: address(index) for index in (0, 2, 5)}}
    kubernetes.delete(2)
    assert resolver.worker_addresses() == {0: address(0), 5: address(5)}
    assert (resolver.task_type, resolver.task_id, resolver.rpc_layer) == ("chief", 0, "grpc")


def test_that_no_pod_is_left_is_an_error_and_changes_nothing(
    kubernetes: FakeKubernetes, resolver: coordinator.KubernetesClusterResolver
) -> None:
    kubernetes.put(pod(0))
    resolver.cluster_spec()
    kubernetes.delete(0)
    with pytest.raises(ClusterSpecError, match="There is no worker pod any more; at least one must stay"):
        resolver.worker_addresses()
    kubernetes.remove(0)
    kubernetes.put(pod(0))
    assert resolver.worker_addresses() == {0: address(0)}
    kubernetes.put(pod(1))
    resolver.close()
    assert resolver.worker_addresses() == {0: address(0)}


def test_addresses_that_are_not_those_of_pods_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for address in ("localhost:1", "127.0.0.1:1", "[::1]:1"):
        monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": {"worker": [address], "ps": ["localhost:2"]}}))
        with pytest.raises(ClusterSpecError, match=r":1', and not that of a pod .* selector='app=NAME'"):
            coordinator.KubernetesClusterResolver()
    monkeypatch.delenv("TF_CONFIG")
    with pytest.raises(ClusterSpecError, match="TF_CONFIG names no worker"):
        coordinator.KubernetesClusterResolver()
