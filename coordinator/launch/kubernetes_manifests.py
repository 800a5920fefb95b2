"""Creates the objects of a training on Kubernetes, as dictionaries, for `coordinator manifest kubernetes`.

    Service          names for all pods of the job, before they are ready
    StatefulSet      parameter servers, and one of workers: `kubectl scale` changes their number
    Job              the program; it is started again when it fails or its node goes
    or JobSet        all three as Jobs, which end when the program has ended; their number is fixed
    PodDisruptionBudget, NetworkPolicy, ServiceAccount, Role, RoleBinding

Guarantees: the objects contain names of pods, never their addresses. The program finds the cluster in `TF_CONFIG`.
"""

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from coordinator.errors import SettingError
from coordinator.options import check_integer

Object = dict[str, Any]

_PORT = 2222
_HEALTH_PORT = 8080
_CHECKPOINTS = "/checkpoints"
# The group that may write to the claim, so that any user of the image can. The Dockerfile's user has the same group.
_GROUP = 1000
# The name of a pod has up to 23 characters more than the job's name, and at most 63.
_LONGEST_NAME = 40
# The maximum number of servers of each kind, which is more than a Kubernetes cluster can have.
_MOST_SERVERS = 100_000
# How often the program is restarted: Kubernetes' default.
_PROGRAM_RESTARTS = 6
# How often servers of a JobSet are restarted: the whole set would fail with the first server that is not restarted.
_SERVER_RESTARTS = 1_000_000
# The seconds between a worker's deletion and its end signal, so that the worker can finish a step and leave the
# cluster.
_DRAINING_SECONDS = 10

_NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_CLAIM = re.compile(r"[a-z0-9]([-.a-z0-9]*[a-z0-9])?")
_QUANTITY = re.compile(r"[0-9]+(\.[0-9]+)?([numkMGTPE]|[KMGTPE]i)?")


@dataclasses.dataclass(frozen=True, kw_only=True)
class KubernetesJob:
    """A training on Kubernetes, as the command line gives it. Raises SettingError for an invalid value.

    Attributes:
      name: the name of the job, with which all objects' names begin.
      image: the container image, which contains this library.
      command: the command of the program's container; empty for the image's own command.
      jobset: use a JobSet, which ends the servers with the program, instead of StatefulSets, which can be scaled.
      cpu: the CPU that each pod requests, such as "2" or "500m"; empty for no request.
      memory: the memory that each pod requests and may use, such as "8Gi"; empty for no request and no limit.
      gpu: the number of GPUs (`nvidia.com/gpu`) of each worker.
      checkpoints: the PersistentVolumeClaim that the program and the parameter servers find at `/checkpoints`, or "".
    """

    name: str
    image: str
    command: Sequence[str] = ()
    workers: int = 1
    ps: int = 1
    jobset: bool = False
    cpu: str = ""
    memory: str = ""
    gpu: int = 0
    checkpoints: str = ""

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name) or len(self.name) > _LONGEST_NAME:
            reason = f"must be at most {_LONGEST_NAME} lower-case letters, digits and '-', and begin with a letter, got"
            raise SettingError("name", f"{reason} {self.name!r}.")
        if not self.image or re.search(r"\s", self.image):
            raise SettingError("image", f"must be the name of a container image, got {self.image!r}.")
        check_integer("workers", self.workers, 1, _MOST_SERVERS)
        check_integer("ps", self.ps, 1, _MOST_SERVERS)
        check_integer("gpu", self.gpu, 0)
        for name, quantity in (("cpu", self.cpu), ("memory", self.memory)):
            if quantity and not _QUANTITY.fullmatch(quantity):
                raise SettingError(name, f"must be a quantity such as 2, 500m or 8Gi, got {quantity!r}.")
        if self.checkpoints and not _CLAIM.fullmatch(self.checkpoints):
            raise SettingError("checkpoints", f"must be the name of a claim, got {self.checkpoints!r}.")

    def objects(self) -> list[Object]:
        """Returns the objects, in an order in which they can be created."""
        objects = [*self._rights(), *self._protection()]
        if self.jobset:
            return [*objects, self._job_set()]
        names = {"clusterIP": "None", "publishNotReadyAddresses": True}
        ports = [{"name": "tensorflow", "port": _PORT}]
        objects.append(self._object("v1", "Service", spec={**names, "selector": self._labels(), "ports": ports}))
        for job, count in self._servers().items():
            spec = {
                "serviceName": self.name,
                "replicas": count,
                "podManagementPolicy": "Parallel",
                "selector": {"matchLabels": self._labels(job)},
                "template": self._server_template(job, "apps.kubernetes.io/pod-index"),
            }
            objects.append(self._object("apps/v1", "StatefulSet", job, spec=spec))
        return [*objects, self._object("batch/v1", "Job", "chief", spec=self._program_job())]

    def _object(self, version: str, kind: str, component: str = "", **content: Any) -> Object:
        name = f"{self.name}-{component}" if component else self.name
        metadata = {"name": name, "labels": self._labels(component)}
        return {"apiVersion": version, "kind": kind, "metadata": metadata, **content}

    def _labels(self, component: str = "") -> dict[str, str]:
        labels = {"app.kubernetes.io/instance": self.name}
        return {**labels, "app.kubernetes.io/component": component} if component else labels

    def _rights(self) -> list[Object]:
        """Returns the objects by which the program may watch the pods. The servers need no rights."""
        group, name = "rbac.authorization.k8s.io", f"{self.name}-chief"
        rule = {"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch"]}
        role = {"apiGroup": group, "kind": "Role", "name": name}
        subjects = [{"kind": "ServiceAccount", "name": name}]
        return [
            self._object("v1", "ServiceAccount", "chief", automountServiceAccountToken=False),
            self._object(f"{group}/v1", "Role", "chief", rules=[rule]),
            self._object(f"{group}/v1", "RoleBinding", "chief", roleRef=role, subjects=subjects),
        ]

    def _protection(self) -> list[Object]:
        # Only pods of the job reach the job's pods, because TensorFlow's servers have no authentication.
        pods = {"matchLabels": self._labels()}
        access = {"podSelector": pods, "policyTypes": ["Ingress"], "ingress": [{"from": [{"podSelector": pods}]}]}
        # When nodes are drained, Kubernetes evicts one parameter server at a time, and the next only when the previous
        # one is back. Kubernetes cannot apply `maxUnavailable` to the pods of Jobs.
        draining = {"minAvailable": self.ps - 1, "selector": {"matchLabels": self._labels("ps")}}
        return [
            self._object("networking.k8s.io/v1", "NetworkPolicy", spec=access),
            self._object("policy/v1", "PodDisruptionBudget", "ps", spec=draining),
        ]

    def _job_set(self) -> Object:
        jobs = {job: self._server_job(job, count) for job, count in self._servers().items()}
        jobs["chief"] = self._program_job()
        spec = {
            "network": {"enableDNSHostnames": True, "subdomain": self.name, "publishNotReadyAddresses": True},
            "successPolicy": {"operator": "All", "targetReplicatedJobs": ["chief"]},
            "replicatedJobs": [{"name": name, "replicas": 1, "template": {"spec": job}} for name, job in jobs.items()],
        }
        return self._object("jobset.x-k8s.io/v1alpha2", "JobSet", spec=spec)

    def _server_job(self, job: str, count: int) -> Object:
        template = self._server_template(job, "batch.kubernetes.io/job-completion-index", restartPolicy="OnFailure")
        numbers = {"completions": count, "parallelism": count, "backoffLimit": _SERVER_RESTARTS}
        return {"completionMode": "Indexed", **numbers, "template": template}

    def _program_job(self) -> Object:
        """Returns the program's Job, which replaces a pod only when it is gone, because two clients would interfere."""
        counts = {"chief": 1, **self._servers()}
        cluster = {job: [f"{self._host(job, i)}:{_PORT}" for i in range(n)] for job, n in counts.items()}
        config = json.dumps({"cluster": cluster, "task": {"type": "chief", "index": 0}})
        container = {
            "name": "chief",
            "image": self.image,
            **({"command": list(self.command)} if self.command else {}),
            "env": [{"name": "PYTHONUNBUFFERED", "value": "1"}, {"name": "TF_CONFIG", "value": config}],
            "ports": [_container_port("tensorflow", _PORT)],
        }
        name = {} if self.jobset else {"hostname": f"{self.name}-chief", "subdomain": self.name}
        account = {"serviceAccountName": f"{self.name}-chief", "automountServiceAccountToken": True}
        disruption = {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
        return {
            **({"completionMode": "Indexed", "completions": 1, "parallelism": 1} if self.jobset else {}),
            "backoffLimit": _PROGRAM_RESTARTS,
            "podReplacementPolicy": "Failed",
            "podFailurePolicy": {"rules": [disruption]},
            "template": self._template("chief", container, restartPolicy="Never", **name, **account),
        }

    def _server_template(self, job: str, index_label: str, **spec: Any) -> Object:
        address = f"{self._host(job, '$(TASK_INDEX)')}:{_PORT}"
        task = ["--job", job, "--index", "$(TASK_INDEX)", "--address", address]
        field = {"fieldPath": f"metadata.labels['{index_label}']"}
        health = {"httpGet": {"path": "/healthz", "port": "health"}}
        container = {
            "name": job,
            "image": self.image,
            "command": ["coordinator", "serve", *task, "--health-port", str(_HEALTH_PORT)],
            "env": [{"name": "TASK_INDEX", "valueFrom": {"fieldRef": field}}],
            "ports": [_container_port("tensorflow", _PORT), _container_port("health", _HEALTH_PORT)],
            "startupProbe": {**health, "periodSeconds": 2, "failureThreshold": 150},
            "readinessProbe": {**health, "periodSeconds": 10},
            # A restarted server loses its variables, so only a server that has hung for minutes is restarted.
            "livenessProbe": {**health, "periodSeconds": 30, "timeoutSeconds": 10, "failureThreshold": 6},
        }
        if job == "worker":
            container["lifecycle"] = {"preStop": {"exec": {"command": ["sleep", str(_DRAINING_SECONDS)]}}}
        return self._template(job, container, automountServiceAccountToken=False, **spec)

    def _template(self, job: str, container: Object, **spec: Any) -> Object:
        container["securityContext"] = {"allowPrivilegeEscalation": False}
        security: Object = {"seccompProfile": {"type": "RuntimeDefault"}}
        limits: Object = {"memory": self.memory} if self.memory else {}
        if self.gpu and job == "worker":
            limits["nvidia.com/gpu"] = self.gpu
        if requests := {**({"cpu": self.cpu} if self.cpu else {}), **limits}:
            container["resources"] = {"requests": requests, **({"limits": limits} if limits else {})}
        if self.checkpoints and job != "worker":
            container["volumeMounts"] = [{"name": "checkpoints", "mountPath": _CHECKPOINTS}]
            claim = {"claimName": self.checkpoints}
            spec["volumes"] = [{"name": "checkpoints", "persistentVolumeClaim": claim}]
            security |= {"fsGroup": _GROUP, "fsGroupChangePolicy": "OnRootMismatch"}
        spec["securityContext"] = security
        return {"metadata": {"labels": self._labels(job)}, "spec": {**spec, "containers": [container]}}

    def _servers(self) -> Mapping[str, int]:
        return {"ps": self.ps, "worker": self.workers}

    def _host(self, job: str, index: object) -> str:
        if self.jobset:
            return f"{self.name}-{job}-0-{index}.{self.name}"
        return f"{self.name}-chief.{self.name}" if job == "chief" else f"{self.name}-{job}-{index}.{self.name}"


def _container_port(name: str, number: int) -> Object:
    return {"name": name, "containerPort": number, "protocol": "TCP"}
