"""Tests of the objects of a training on Kubernetes: the parts of them that must agree with each other."""

import importlib
import json
from collections.abc import Iterator
from typing import Any

import pytest

from coordinator.launch.kubernetes_manifests import KubernetesJob

JOB = {"name": "digits", "image": "registry:5000/digits@sha256:1f", "command": ["python", "train.py"]}
SIZES = {"workers": 4, "ps": 2, "cpu": "2", "memory": "8Gi", "gpu": 1, "checkpoints": "claim"}

either_shape = pytest.mark.parametrize("jobset", [False, True], ids=["stateful-sets", "job-set"])


def objects(**settings: Any) -> dict[str, list[dict[str, Any]]]:
    """Returns the objects by kind."""
    found: dict[str, list[dict[str, Any]]] = {}
    for item in KubernetesJob(**JOB | SIZES | settings).objects():
        found.setdefault(item["kind"], []).append(item)
    return found


def pods(found: dict[str, list[dict[str, Any]]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the name in DNS and the template of each pod."""
    for owner in [*found.get("StatefulSet", ()), *found.get("Job", ())]:
        template = owner["spec"]["template"]
        spec = template["spec"]
        if owner["kind"] == "Job":
            yield f"{spec['hostname']}.{spec['subdomain']}", template
        for index in range(owner["spec"].get("replicas", 0)):
            yield f"{owner['metadata']['name']}-{index}.{owner['spec']['serviceName']}", template
    for owner in found.get("JobSet", ()):
        for job in owner["spec"]["replicatedJobs"]:
            spec = job["template"]["spec"]
            for index in range(spec["completions"]):
                name = f"{owner['metadata']['name']}-{job['name']}-0-{index}"
                yield f"{name}.{owner['spec']['network']['subdomain']}", spec["template"]


def component(template: dict[str, Any]) -> str:
    return template["metadata"]["labels"]["app.kubernetes.io/component"]


def container(template: dict[str, Any]) -> dict[str, Any]:
    (only,) = template["spec"]["containers"]
    return only


def is_matched(labels: dict[str, str], selector: dict[str, Any]) -> bool:
    return selector.get("matchLabels", selector).items() <= labels.items()


@either_shape
def test_servers_serve_at_the_names_of_their_pods_by_which_the_program_finds_them(jobset: bool) -> None:
    named: dict[str, list[str]] = {}
    found = dict(pods(objects(jobset=jobset)))
    for name, template in found.items():
        named.setdefault(component(template), []).append(f"{name}:2222")
        if component(template) != "chief":
            command = container(template)["command"]
            assert command[:4] == ["coordinator", "serve", "--job", component(template)]
            options = dict(zip(command[2::2], command[3::2], strict=True))
            assert options["--index"] == "$(TASK_INDEX)"
            index = name.partition(".")[0].rpartition("-")[2]
            assert options["--address"].replace("$(TASK_INDEX)", index) == f"{name}:2222"
            (env,) = container(template)["env"]
            label = "batch.kubernetes.io/job-completion-index" if jobset else "apps.kubernetes.io/pod-index"
            assert env["valueFrom"]["fieldRef"]["fieldPath"] == f"metadata.labels['{label}']"
    (program,) = (container(template) for template in found.values() if component(template) == "chief")
    config = json.loads({entry["name"]: entry["value"] for entry in program["env"]}["TF_CONFIG"])
    assert config == {"cluster": named, "task": {"type": "chief", "index": 0}}
    assert {job: len(addresses) for job, addresses in named.items()} == {"chief": 1, "ps": 2, "worker": 4}
    assert program["command"] == ["python", "train.py"]


@either_shape
def test_selectors_match_the_pods_that_they_are_for(jobset: bool) -> None:
    found = objects(jobset=jobset)
    templates = [(component(template), template["metadata"]["labels"]) for _, template in pods(found)]
    (policy,), (budget,) = found["NetworkPolicy"], found["PodDisruptionBudget"]
    (rule,) = policy["spec"]["ingress"]
    everyone = [policy["spec"]["podSelector"], rule["from"][0]["podSelector"]]
    everyone += [service["spec"]["selector"] for service in found.get("Service", ())]
    for job, labels in templates:
        assert all(is_matched(labels, selector) for selector in everyone)
        assert is_matched(labels, budget["spec"]["selector"]) == (job == "ps")
    for owner in found.get("StatefulSet", ()):
        assert is_matched(owner["spec"]["template"]["metadata"]["labels"], owner["spec"]["selector"])


@either_shape
def test_the_program_alone_has_rights_and_workers_alone_gpus(jobset: bool) -> None:
    found = objects(jobset=jobset)
    (account,), (role,), (binding,) = (found[kind] for kind in ("ServiceAccount", "Role", "RoleBinding"))
    assert role["rules"] == [{"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch"]}]
    assert binding["roleRef"]["name"] == role["metadata"]["name"]
    assert binding["subjects"] == [{"kind": "ServiceAccount", "name": account["metadata"]["name"]}]
    for _, template in pods(found):
        spec, job = template["spec"], component(template)
        assert spec["automountServiceAccountToken"] == (job == "chief")
        assert spec.get("serviceAccountName") == (account["metadata"]["name"] if job == "chief" else None)
        assert ("nvidia.com/gpu" in container(template)["resources"]["limits"]) == (job == "worker")
        mounts = [mount["mountPath"] for mount in container(template).get("volumeMounts", ())]
        assert mounts == ([] if job == "worker" else ["/checkpoints"])


# The first one has the label with a pod's index; it also requires `status` in `podFailurePolicy`.
VERSIONS = ["1.28", "1.33", "1.37"]


@pytest.mark.release
@pytest.mark.parametrize("settings", [{}, SIZES], ids=["small", "large"])
def test_kubernetes_and_job_sets_accept_the_objects(settings: dict[str, Any]) -> None:
    """Needs the extra `release` (`pip install -e '.[release]'`), whose packages have the schemas."""
    models = importlib.import_module("kubeflow_trainer_api.models")
    validate = importlib.import_module("kubernetes_validate").validate
    job = {**JOB, "workers": 4, "ps": 2, **settings}
    for version in VERSIONS:
        for item in KubernetesJob(**job).objects():
            validate(item, version, strict=True)
    *others, job_set = KubernetesJob(**job, jobset=True).objects()
    assert models.JobsetV1alpha2JobSet.from_dict(job_set).to_dict() == job_set
    for item in others:
        validate(item, VERSIONS[-1], strict=True)
    # Its models of Jobs take any field; Kubernetes's own schema does not.
    for replicated in job_set["spec"]["replicatedJobs"]:
        inner = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": replicated["name"]}}
        for version in VERSIONS:
            validate({**inner, "spec": replicated["template"]["spec"]}, version, strict=True)
