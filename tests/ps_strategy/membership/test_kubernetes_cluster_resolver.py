"""The resolver that follows pods, against an HTTP server that lists and watches as the API server does."""

import concurrent.futures
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import tensorflow as tf

from coordinator.errors import ClusterSpecError
from coordinator.launch.kubernetes_manifests import KubernetesJob
from coordinator.ps_strategy.membership import kubernetes_cluster_resolver
from coordinator.ps_strategy.membership.kubernetes_cluster_resolver import KubernetesClusterResolver
from tests.deadline import LIMIT
from tests.ps_strategy.membership.fake_kubernetes import SELECTOR, FakeKubernetes, pod


def addresses(*indices: int) -> dict[int, str]:
    return {index: f"digits-worker-{index}.digits:2222" for index in indices}


def new_resolver(kubernetes: FakeKubernetes, credentials: Path) -> KubernetesClusterResolver:
    cluster = tf.train.ClusterSpec({"worker": list(addresses(0).values()), "ps": ["ps:2222"]})
    described = tf.distribute.cluster_resolver.SimpleClusterResolver(cluster)
    return KubernetesClusterResolver(described, selector=SELECTOR, api_server=kubernetes.url, credentials=credentials)


def listed(resolver: KubernetesClusterResolver) -> dict[int, str]:
    spec = resolver.cluster_spec()
    return {index: spec.task_address("worker", index) for index in spec.task_indices("worker")}


@pytest.fixture
def kubernetes() -> Iterator[FakeKubernetes]:
    with FakeKubernetes() as kubernetes:
        yield kubernetes


@pytest.fixture
def pods(kubernetes: FakeKubernetes, tmp_path: Path) -> KubernetesClusterResolver:
    """The pods 0 and 1, listed."""
    other = pod(7)
    other["metadata"]["labels"]["app.kubernetes.io/component"] = "ps"
    for each in (pod(0), pod(1), other):
        kubernetes.put(each)
    pods = new_resolver(kubernetes, tmp_path)
    assert listed(pods) == addresses(0, 1)
    return pods


def test_the_workers_are_the_pods_and_all_else_is_of_the_manifests_tf_config(
    kubernetes: FakeKubernetes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = KubernetesJob(name="digits", image="image", workers=2, ps=2).objects()[-1]
    (container,) = program["spec"]["template"]["spec"]["containers"]
    (text,) = [variable["value"] for variable in container["env"] if variable["name"] == "TF_CONFIG"]
    monkeypatch.setenv("TF_CONFIG", text)
    resolver = KubernetesClusterResolver(api_server=kubernetes.url, credentials=tmp_path)
    others = {"chief": ["digits-chief.digits:2222"], "ps": ["digits-ps-0.digits:2222", "digits-ps-1.digits:2222"]}
    assert resolver.cluster_spec().as_dict() == {**others, "worker": [*addresses(0, 1).values()]}
    for index in (2, 0, 5):
        kubernetes.put(pod(index))
    assert resolver.cluster_spec().as_dict() == {**others, "worker": addresses(0, 2, 5)}
    kubernetes.delete(2)
    assert resolver.worker_addresses() == addresses(0, 5)
    assert (resolver.task_type, resolver.task_id, resolver.rpc_layer) == ("chief", 0, "grpc")


def test_addresses_that_are_not_those_of_pods_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for address in ("localhost:1", "127.0.0.1:1", "[::1]:1"):
        monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": {"worker": [address], "ps": ["localhost:2"]}}))
        with pytest.raises(ClusterSpecError, match=r":1', and not that of a pod .* selector='app=NAME'"):
            KubernetesClusterResolver()
    monkeypatch.delenv("TF_CONFIG")
    with pytest.raises(ClusterSpecError, match="TF_CONFIG names no worker"):
        KubernetesClusterResolver()


def test_pods_come_and_go(kubernetes: FakeKubernetes, pods: KubernetesClusterResolver) -> None:
    kubernetes.put(pod(4, phase="Pending"))  # has no name yet
    kubernetes.put(pod(3))
    assert pods.worker_addresses() == addresses(0, 1, 3)
    kubernetes.put(pod(3))  # nothing that matters
    kubernetes.put(pod(2))
    assert pods.worker_addresses() == addresses(0, 1, 2, 3)
    kubernetes.delete(1)
    assert pods.worker_addresses() == addresses(0, 2, 3)
    kubernetes.remove(1)
    kubernetes.put(pod(0, phase="Failed"))
    assert pods.worker_addresses() == addresses(2, 3)
    kubernetes.remove(2)
    assert pods.worker_addresses() == addresses(3)
    assert [request.get("watch") for request in kubernetes.requests] == [None, *"11111"]
    kubernetes.delete(3)
    with pytest.raises(ClusterSpecError, match="There is no worker pod any more; at least one must stay"):
        pods.worker_addresses()
    kubernetes.put(pod(0))
    assert pods.worker_addresses() == addresses(0)


@pytest.mark.parametrize("is_listed_again", [False, True])
def test_an_evicted_pod_keeps_its_place_until_it_is_replaced(
    kubernetes: FakeKubernetes, pods: KubernetesClusterResolver, monkeypatch: pytest.MonkeyPatch, is_listed_again: bool
) -> None:
    kubernetes.put(pod(1, is_evicted=True))
    kubernetes.put(pod(1, is_evicted=True, deletionTimestamp="2026-01-01T00:00:00Z"))
    kubernetes.put(pod(2))
    assert pods.worker_addresses() == addresses(0, 1, 2)
    kubernetes.remove(1)
    if is_listed_again:
        kubernetes.forget()
    kubernetes.put(pod(3))
    assert pods.worker_addresses() == addresses(0, 1, 2, 3)
    kubernetes.put(pod(1, phase="Pending"))
    kubernetes.put(pod(1))
    kubernetes.delete(1)
    monkeypatch.setattr(kubernetes_cluster_resolver, "_REPLACEMENT_TIMEOUT", 0.0)
    assert pods.worker_addresses() == addresses(0, 2, 3), "it is deleted, and not evicted"
    kubernetes.put(pod(2, is_evicted=True))
    kubernetes.remove(2)
    assert pods.worker_addresses() == addresses(0, 3), "there was no replacement"


def test_a_wait_lasts_until_something_changes_or_it_is_ended(
    kubernetes: FakeKubernetes, pods: KubernetesClusterResolver
) -> None:
    with concurrent.futures.ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(pods.worker_addresses)
        kubernetes.wait_watched()
        kubernetes.bookmark()
        kubernetes.put(pod(2))
        assert waiting.result(LIMIT) == addresses(0, 1, 2)
        waiting = threads.submit(pods.worker_addresses)
        kubernetes.wait_watched(2)
        pods.close()
        assert waiting.result(LIMIT) == addresses(0, 1, 2)
    kubernetes.put(pod(3))
    assert pods.worker_addresses() == addresses(0, 1, 2), "later ones end at once"
    assert listed(pods) == addresses(0, 1, 2, 3)
    # A bookmark is where the next watch begins.
    versions = [int(request["resourceVersion"]) for request in kubernetes.requests if "watch" in request]
    assert versions[1] >= versions[0] + 2


def test_pods_are_listed_again_when_changes_were_forgotten(
    kubernetes: FakeKubernetes, pods: KubernetesClusterResolver
) -> None:
    for kubernetes.gone_status in (410, 200):
        kubernetes.remove(1)
        kubernetes.put(pod(2))
        kubernetes.forget()
        assert pods.worker_addresses() == addresses(0, 2)
        kubernetes.put(pod(1))
        assert pods.worker_addresses() == addresses(0, 1, 2)


def test_the_token_and_the_certificate_are_read_again_for_each_request(tmp_path: Path) -> None:
    first, second = certificate(tmp_path / "first"), certificate(tmp_path / "second")
    trusted, token = tmp_path / "ca.crt", tmp_path / "token"
    trusted.write_bytes(first.read_bytes())
    with FakeKubernetes(first) as kubernetes:
        kubernetes.put(pod(0))
        pods = new_resolver(kubernetes, tmp_path)
        for kubernetes.token in ("one", "another"):
            with pytest.raises(ConnectionError, match=r"401 Unauthorized\. Give this pod's service account"):
                listed(pods)
            token.write_text(f"{kubernetes.token}\n")
            assert listed(pods) == addresses(0)
        kubernetes.renew(second)
        with pytest.raises(ConnectionError, match="certificate verify failed"):
            listed(pods)
        trusted.write_bytes(second.read_bytes())
        assert listed(pods) == addresses(0)


def certificate(folder: Path) -> Path:
    """Creates a certificate for 127.0.0.1, in one file with its key."""
    folder.mkdir()
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    files = ["-keyout", folder / "key", "-out", folder / "certificate"]
    name = ["-subj", "/CN=kubernetes", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run([*command, *name, *files], check=True, capture_output=True)
    both = folder / "both"
    both.write_bytes((folder / "key").read_bytes() + (folder / "certificate").read_bytes())
    return both


def test_an_api_server_that_does_not_answer_is_named(tmp_path: Path) -> None:
    with FakeKubernetes() as kubernetes:
        kubernetes.put(pod(0))
        pods = new_resolver(kubernetes, tmp_path)
        listed(pods)
    for wait in (pods.worker_addresses, pods.cluster_spec):
        with pytest.raises(ConnectionError, match="The pods in namespace default cannot be read from http://127"):
            wait()


def test_a_pod_without_index_or_address_is_named(kubernetes: FakeKubernetes, pods: KubernetesClusterResolver) -> None:
    changed = pod(2)
    del changed["metadata"]["labels"]["apps.kubernetes.io/pod-index"]
    kubernetes.put(changed)
    with pytest.raises(ValueError, match=r"Pod digits-worker-2 has no label apps\.kubernetes\.io/pod-index"):
        pods.worker_addresses()
    changed = pod(2)
    del changed["spec"]["subdomain"]
    kubernetes.put(changed)
    for read in (lambda: listed(pods), pods.worker_addresses):
        with pytest.raises(ValueError, match="Pod digits-worker-2 has no address: it needs a headless Service"):
            read()
    kubernetes.put(pod(2))
    assert pods.worker_addresses() == addresses(0, 1, 2)
