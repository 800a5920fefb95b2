"""A cluster resolver whose workers are the pods that Kubernetes runs: `kubectl scale` adds and removes workers.

The resolver reads a list of the pods from Kubernetes's HTTP API, then watches changes of the list.

Promises: an address is a name in DNS, which a pod keeps when it is replaced. A pod joins when its name is in DNS, and
leaves when its deletion begins. An evicted pod keeps its place until it is replaced, like a restarted server. Each
request reads the token and the certificate again, since Kubernetes renews both.
"""

import contextlib
import http.client
import json
import os
import pathlib
import socket
import ssl
import time
import urllib.parse
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import tensorflow as tf

from coordinator.addresses import parse_address
from coordinator.errors import ClusterSpecError
from coordinator.ps_strategy.membership.cluster_definition import PolledClusterResolver

# The labels with the index of a pod, which StatefulSets and indexed Jobs set.
_INDEX_LABELS = ("apps.kubernetes.io/pod-index", "batch.kubernetes.io/job-completion-index")
_PORT_NAME = "tensorflow"
# How long the API server keeps a watch open, in seconds: a broken connection may go unnoticed for that time.
_WATCH_SECONDS = 30
# The longest time to connect, and to wait for an answer beyond the duration of a watch, in seconds.
_ANSWER_TIMEOUT = 10.0
# How long an evicted pod keeps its place without a replacement, in seconds: a node may have to be added first.
_REPLACEMENT_TIMEOUT = 600.0
_API_SERVER = "https://kubernetes.default.svc"
_CREDENTIALS = "/var/run/secrets/kubernetes.io/serviceaccount"


class KubernetesClusterResolver(PolledClusterResolver):
    """A cluster on Kubernetes whose worker pods are followed while training runs.

        strategy = coordinator.ParameterServerStrategy(coordinator.KubernetesClusterResolver())

    The program runs in a pod that `coordinator manifest kubernetes` describes. `TF_CONFIG` names the client and the
    parameter servers. The workers are the present pods, each with the index of its pod, or the workers of `TF_CONFIG`
    while there is no pod. A pod that is being deleted leaves the cluster immediately, and finishes its functions. An
    evicted pod, whose node is drained, is a lost worker until its replacement answers.

    Args:
      cluster_resolver: describes the cluster at the beginning; None reads `TF_CONFIG`.
      selector: the labels of worker pods, as in `kubectl get pods -l`; None for the labels in the manifests.
      namespace: the namespace of the pods; None for this pod's namespace.
      api_server: the URL of Kubernetes's API server, by default of the cluster that runs this pod.
      credentials: the folder with `token` and `ca.crt` of the service account, by default this pod's.

    Raises:
      ClusterSpecError: `selector` is None, and there are no workers, or their addresses are not names of pods.
    """

    def __init__(
        self,
        cluster_resolver: Any = None,
        *,
        selector: str | None = None,
        namespace: str | None = None,
        api_server: str = _API_SERVER,
        credentials: str | os.PathLike[str] = _CREDENTIALS,
    ) -> None:
        if cluster_resolver is None:
            cluster_resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
        super().__init__(lambda: cluster_resolver.cluster_spec().as_dict(), interval=1.0)
        if selector is None:
            labels = {"instance": _service(cluster_resolver), "component": "worker"}
            selector = ",".join(f"app.kubernetes.io/{name}={value}" for name, value in labels.items())
        self._selector = selector
        self._api_server = urllib.parse.urlsplit(api_server)
        self._credentials = pathlib.Path(credentials)
        self._namespace = namespace or self._credential("namespace") or "default"
        self._pods: dict[str, Any] = {}
        # Evicted pods that are gone, and the times at which they lose their places.
        self._evicted: dict[str, tuple[Any, float]] = {}
        # The resource version of `_pods`; None if the pods must be listed again.
        self._version: str | None = None
        self._returned: dict[int, str] = {}
        self._connection: http.client.HTTPConnection | None = None
        self._is_interrupted = False

    def cluster_spec(self) -> tf.train.ClusterSpec:
        """Returns the cluster with the present workers.

        Raises:
          ConnectionError: the API server did not answer, or refused.
          ValueError: a pod has no index or no name in DNS.
        """
        cluster = self._read()
        self._is_interrupted = False
        self._read_list()
        self._returned = self._addresses()
        return tf.train.ClusterSpec({**cluster, "worker": self._returned or cluster["worker"]})

    def worker_addresses(self) -> Mapping[int, str]:
        """Waits until the worker pods have changed, or for about 30 s; returns their addresses by index.

        Raises:
          ClusterSpecError: there is no worker pod.
          ConnectionError: the API server did not answer, or refused. The next call tries again.
          ValueError: a pod has no index or no name in DNS.
        """
        try:
            if self._version is None:
                self._read_list()
            elif not self._has_changed():
                self._watch()
        except ConnectionError:
            if not self._is_interrupted:
                raise
        self._returned = self._addresses()
        if not self._returned:
            raise ClusterSpecError("There is no worker pod any more; at least one must stay.")
        return self._returned

    def close(self) -> None:
        """Ends a waiting call of `worker_addresses`; later calls end immediately until `cluster_spec` is called."""
        self._is_interrupted = True
        if (connection := self._connection) is not None and connection.sock is not None:
            with contextlib.suppress(OSError):
                connection.sock.shutdown(socket.SHUT_RDWR)

    def _read_list(self) -> None:
        self._version = None
        with self._answer({}) as lines:
            listing = json.loads(b"".join(lines))
        pods = {pod["metadata"]["name"]: pod for pod in listing["items"]}
        for name in self._pods.keys() - pods.keys():
            self._forget(name)
        self._pods = pods
        self._version = listing["metadata"]["resourceVersion"]

    def _has_changed(self) -> bool:
        return self._version is None or self._addresses() != self._returned

    def _watch(self) -> None:
        version = {"resourceVersion": self._version, "timeoutSeconds": _WATCH_SECONDS, "allowWatchBookmarks": "true"}
        with self._answer({"watch": 1, **version}) as lines:
            for line in lines:
                self._apply(json.loads(line))
                if self._has_changed():
                    break
        if self._version is None:
            self._read_list()

    def _apply(self, event: Mapping[str, Any]) -> None:
        changed = event["object"]
        if event["type"] == "ERROR":
            # The error is mostly 410 Gone: the API server has forgotten the changes since that version.
            self._version = None
            return
        self._version = changed["metadata"]["resourceVersion"]
        if event["type"] in ("ADDED", "MODIFIED"):
            self._pods[changed["metadata"]["name"]] = changed
        elif event["type"] == "DELETED":
            self._forget(changed["metadata"]["name"])

    def _forget(self, name: str) -> None:
        pod = self._pods.pop(name, None)
        if pod is not None and _is_evicted(pod):
            self._evicted[name] = pod, time.monotonic() + _REPLACEMENT_TIMEOUT

    @contextlib.contextmanager
    def _answer(self, parameters: Mapping[str, object]) -> Iterator[Iterable[bytes]]:
        """Sends a request; yields the lines of the answer, or no lines if the answer is 410 Gone."""
        query = urllib.parse.urlencode({"labelSelector": self._selector, **parameters})
        path = f"{self._api_server.path}/api/v1/namespaces/{self._namespace}/pods"
        try:
            with contextlib.closing(self._connected()) as connection:
                token = self._credential("token")
                headers = {"Authorization": f"Bearer {token}"} if token else {}
                connection.request("GET", f"{path}?{query}", headers=headers)
                response = connection.getresponse()
                if response.status == http.HTTPStatus.GONE:
                    self._version = None
                elif response.status != http.HTTPStatus.OK:
                    raise ConnectionError(_refusal(response))
                yield response if response.status == http.HTTPStatus.OK else ()
        except (OSError, http.client.HTTPException, json.JSONDecodeError) as error:
            where = f"The pods in namespace {self._namespace} cannot be read from {self._api_server.geturl()}"
            raise ConnectionError(f"{where}: {error}") from None
        finally:
            self._connection = None

    def _connected(self) -> http.client.HTTPConnection:
        host, port = self._api_server.hostname or "", self._api_server.port
        connection: http.client.HTTPConnection
        if self._api_server.scheme == "https":
            certificate = self._credentials / "ca.crt"
            context = ssl.create_default_context(cafile=certificate if certificate.exists() else None)
            # The certificates of many clusters lack fields that this flag requires. Python sets it from 3.13 on.
            context.verify_flags &= ~ssl.VERIFY_X509_STRICT
            connection = http.client.HTTPSConnection(host, port, timeout=_ANSWER_TIMEOUT, context=context)
        else:
            connection = http.client.HTTPConnection(host, port, timeout=_ANSWER_TIMEOUT)
        connection.connect()
        connection.sock.settimeout(_WATCH_SECONDS + _ANSWER_TIMEOUT)
        # The connection is set before the flag is read: `close` sets the flag before it reads the connection.
        self._connection = connection
        if self._is_interrupted:
            connection.close()
            raise ConnectionError("the wait was ended")
        return connection

    def _credential(self, name: str) -> str:
        path = self._credentials / name
        return path.read_text(encoding="utf-8").strip() if path.exists() else ""

    def _addresses(self) -> dict[int, str]:
        present = {name: pod for name, pod in self._pods.items() if _is_present(pod)}
        now = time.monotonic()
        self._evicted = {
            name: (pod, end) for name, (pod, end) in self._evicted.items() if name not in present and now < end
        }
        awaited = [pod for pod, _ in self._evicted.values()]
        try:
            return dict(sorted(_index_and_address(pod) for pod in (*awaited, *present.values())))
        except ValueError:
            # Otherwise each call would raise the same error until the pods are listed again.
            self._version = None
            raise


def _is_present(pod: Mapping[str, Any]) -> bool:
    status = pod.get("status", {})
    has_ended = status.get("phase") in ("Succeeded", "Failed")
    # The name of an unscheduled pod is not in DNS yet. A lookup now would have its absence cached for a while.
    is_unscheduled = status.get("phase") == "Pending" and not status.get("podIP")
    return _is_evicted(pod) or not (has_ended or is_unscheduled or "deletionTimestamp" in pod["metadata"])


def _is_evicted(pod: Mapping[str, Any]) -> bool:
    """Returns True if Kubernetes takes the pod from its node but not from its job, as `kubectl drain` does."""
    conditions = pod.get("status", {}).get("conditions", ())
    return any(part["type"] == "DisruptionTarget" and part["status"] == "True" for part in conditions)


def _index_and_address(pod: Mapping[str, Any]) -> tuple[int, str]:
    name, labels, spec = pod["metadata"]["name"], pod["metadata"].get("labels", {}), pod["spec"]
    index = next((labels[label] for label in _INDEX_LABELS if label in labels), None)
    if index is None:
        raise ValueError(
            f"Pod {name} has no label {_INDEX_LABELS[0]}: workers must be the pods of a StatefulSet or of an indexed "
            "Job, on Kubernetes 1.28 or later."
        )
    ports = [port for container in spec["containers"] for port in container.get("ports", ())]
    numbers = [port["containerPort"] for port in ports if port.get("name") == _PORT_NAME]
    if not numbers or not spec.get("hostname") or not spec.get("subdomain"):
        raise ValueError(
            f"Pod {name} has no address: it needs a headless Service (serviceName in its StatefulSet), and a container "
            f"port with the name {_PORT_NAME}."
        )
    return int(index), f"{spec['hostname']}.{spec['subdomain']}:{numbers[0]}"


def _refusal(response: http.client.HTTPResponse) -> str:
    advice = ""
    if response.status in (http.HTTPStatus.UNAUTHORIZED, http.HTTPStatus.FORBIDDEN):
        advice = ". Give this pod's service account a Role that may list and watch pods"
    try:
        reason = json.loads(response.read())["message"]
    except (ValueError, LookupError, TypeError):
        reason = response.reason
    return f"{response.status} {reason}{advice}."


def _service(resolver: Any) -> str:
    """Returns the name of the workers' Service, with which the manifests label all pods."""
    spec = resolver.cluster_spec()
    addresses = spec.job_tasks("worker") if "worker" in spec.jobs else []
    if not addresses:
        raise ClusterSpecError(
            "TF_CONFIG names no worker; `coordinator manifest kubernetes` sets it in the program's pod."
        )
    names = parse_address(addresses[0]).host.split(".")
    if len(names) < 2 or names[-1].isdecimal():
        raise ClusterSpecError(
            f"The address of a worker is {addresses[0]!r}, and not that of a pod (POD.SERVICE:PORT), as `coordinator "
            "manifest kubernetes` sets it in TF_CONFIG. Give the labels of the worker pods: selector='app=NAME'."
        )
    return names[1]
