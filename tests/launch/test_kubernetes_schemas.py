"""The objects for Kubernetes comply with the schemas of three of its versions, and of JobSet.

Needs the extra `release` (`pip install -e '.[release]'`), whose packages have these schemas.
"""

import importlib
from typing import Any

import pytest

from coordinator.launch.kubernetes_manifests import KubernetesJob

pytestmark = pytest.mark.release

LARGE = {"cpu": "500m", "memory": "8Gi", "gpu": 2, "checkpoints": "claim", "command": ["python", "train.py"]}
# The first one has the label with a pod's index; it also requires `status` in `podFailurePolicy`.
VERSIONS = ["1.28", "1.33", "1.37"]


def objects(settings: dict[str, Any], jobset: bool) -> list[dict[str, Any]]:
    return KubernetesJob(name="digits", image="digits:1", workers=4, ps=2, jobset=jobset, **settings).objects()


@pytest.mark.parametrize("settings", [{}, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("version", VERSIONS)
def test_kubernetes_accepts_the_objects(version: str, settings: dict[str, Any]) -> None:
    validation = importlib.import_module("kubernetes_validate")
    for item in objects(settings, jobset=False):
        validation.validate(item, version, strict=True)


@pytest.mark.parametrize("settings", [{}, LARGE], ids=["small", "large"])
def test_the_job_set_has_only_fields_that_job_sets_have(settings: dict[str, Any]) -> None:
    models = importlib.import_module("kubeflow_trainer_api.models")
    validation = importlib.import_module("kubernetes_validate")
    *others, job_set = objects(settings, jobset=True)
    assert models.JobsetV1alpha2JobSet.from_dict(job_set).to_dict() == job_set
    for item in others:
        validation.validate(item, VERSIONS[-1], strict=True)
    # Its models of Jobs take any field; Kubernetes's own schema does not.
    for replicated in job_set["spec"]["replicatedJobs"]:
        job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": replicated["name"]}}
        for version in VERSIONS:
            validation.validate({**job, "spec": replicated["template"]["spec"]}, version, strict=True)
