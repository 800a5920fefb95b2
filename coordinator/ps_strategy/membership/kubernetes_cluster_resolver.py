"""A cluster resolver whose workers are the pods that Kubernetes runs: `kubectl scale` adds and removes them."""

import os
import pathlib
from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from coordinator.addresses import parse_address
from coordinator.errors import ClusterSpecError
from coordinator.ps_strategy.membership.kubernetes_pods import KubernetesPods
from coordinator.ps_strategy.membership.polled_cluster_resolver import PolledClusterResolver

_API_SERVER = "https://kubernetes.default.svc"
_CREDENTIALS = "/var/run/secrets/kubernetes.io/serviceaccount"


class KubernetesClusterResolver(PolledClusterResolver):
    """Describes a cluster on Kubernetes, and follows its worker pods while training runs.

        strategy = coordinator.ParameterServerStrategy(coordinator.KubernetesClusterResolver())

    It is for programs in a pod that `coordinator manifest kubernetes` describes. The client and the parameter servers
    are those of `TF_CONFIG`. The workers are the present pods, each with the index of its pod, or those of `TF_CONFIG`
    while there is none. A pod that is being deleted leaves the cluster at once, and finishes what it runs. One that is
    evicted, since its node is drained, is a lost worker until its replacement answers.

    Args:
      cluster_resolver: describes the cluster at the beginning; None reads `TF_CONFIG`.
      selector: the labels of worker pods, as in `kubectl get pods -l`; None for those of the manifests.
      namespace: of the pods; None for that of this pod.
      api_server: the URL of Kubernetes's API server, by default that of the cluster that runs this pod.
      credentials: the folder with `token` and `ca.crt` of the service account, by default that of this pod. Both are
        read again for each request, since Kubernetes renews them.

    Raises:
      ClusterSpecError: `selector` is None, and the addresses of workers are not names of pods, or there are none.
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
        self._pods = KubernetesPods(selector, namespace, api_server, pathlib.Path(credentials))

    def cluster_spec(self) -> tf.train.ClusterSpec:
        """Returns the cluster with the workers that there are now.

        Raises:
          ConnectionError: the API server did not answer, or refused.
        """
        cluster = self._read()
        return tf.train.ClusterSpec({**cluster, "worker": self._pods.list() or cluster["worker"]})

    def worker_addresses(self) -> Mapping[int, str]:
        """Waits until the worker pods have changed, or for about 30 s, and returns their addresses by index.

        Raises:
          ClusterSpecError: there is no worker pod.
          ConnectionError: the API server did not answer, or refused.
        """
        if not (addresses := self._pods.wait_changed()):
            raise ClusterSpecError("There is no worker pod any more; at least one must stay.")
        return addresses

    def close(self) -> None:
        """Ends a `worker_addresses` that waits. `cluster_spec` begins again."""
        self._pods.interrupt()


def _service(resolver: Any) -> str:
    """Returns the name of the Service of the workers, with which the manifests label all pods."""
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
