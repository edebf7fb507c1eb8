# SPDX-License-Identifier: Apache-2.0
"""The manifests under examples/clusters are what Kubernetes and Kubeflow Trainer take, and agree with the code."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from paceline.communication import schedulers

yaml = pytest.importorskip("yaml")

EXAMPLES = Path(__file__).parents[2] / "examples" / "clusters"
KINDS = {
    ("v1", "Service"): "IoK8sApiCoreV1Service",
    ("batch/v1", "Job"): "IoK8sApiBatchV1Job",
    ("trainer.kubeflow.org/v1alpha1", "TrainJob"): "TrainerV1alpha1TrainJob",
}


def manifests(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((EXAMPLES / name).read_text(encoding="utf-8")))


def check(manifest: dict[str, Any]) -> None:
    """Types are the model's to check; what it does not know it drops, so that the comparison finds it."""
    models = pytest.importorskip("kubeflow_trainer_api.models")
    model = getattr(models, KINDS[manifest["apiVersion"], manifest["kind"]])
    assert model.from_dict(manifest).to_dict() == manifest


@pytest.mark.parametrize("name", ["indexed_job.yaml", "trainjob.yaml"])
def test_they_fit_the_schemas(name: str) -> None:
    for manifest in manifests(name):
        check(manifest)


def test_the_check_finds_what_is_wrong() -> None:
    job = manifests("trainjob.yaml")[0]
    job["spec"]["trainer"]["elasticPolicy"] = {"minNodes": 1}
    with pytest.raises(AssertionError):
        check(job)
    del job["spec"]["trainer"]["elasticPolicy"]
    job["spec"]["trainer"]["numNodes"] = "two"
    with pytest.raises(ValueError, match="numNodes"):
        check(job)


def test_pods_find_each_other() -> None:
    service, job = manifests("indexed_job.yaml")
    pod, name = job["spec"]["template"]["spec"], job["metadata"]["name"]
    assert service["spec"]["clusterIP"] == "None" and service["spec"]["publishNotReadyAddresses"]
    assert pod["subdomain"] == service["metadata"]["name"] and service["spec"]["selector"] == {"job-name": name}
    command = pod["containers"][0]["command"]
    assert int(command[command.index("--hosts") + 1]) == job["spec"]["completions"] == job["spec"]["parallelism"]
    found = schedulers.indexed({"JOB_COMPLETION_INDEX": "1"}, lambda: f"{name}-1.{pod['subdomain']}.default")
    assert found is not None and found.master is not None and found.master[0] == f"{name}-0.train.default"


@pytest.mark.processes
def test_the_batch_script_is_one() -> None:
    subprocess.run(["bash", "-n", str(EXAMPLES / "slurm.sbatch")], check=True, timeout=60)
