"""The schemas of Kubernetes, JobSet and Kubeflow Trainer, with unknown fields refused."""

from __future__ import annotations

from typing import Any, get_args, get_origin

VERSION = "1.37"


def check(document: Any) -> None:
    """Checks an object of Kubernetes itself, or of JobSet or Kubeflow with the Jobs in it.

    Imports here, since tests are collected where scripts/setup-launchers has not run.
    """
    from kubeflow_trainer_api import models

    if document["kind"] == "JobSet":
        check_model(models.JobsetV1alpha2JobSet, document)
        check_jobs(document["spec"])
    elif document["kind"] == "TrainJob":
        check_model(models.TrainerV1alpha1TrainJob, document)
    elif document["kind"] == "TrainingRuntime":
        check_model(models.TrainerV1alpha1TrainingRuntime, document)
        check_jobs(document["spec"]["template"]["spec"])
    else:
        _check_core(document)


def check_jobs(spec: Any) -> None:
    """Checks the Jobs of a JobSet's spec by the stricter schema of their own."""
    for each in spec["replicatedJobs"]:
        template = each["template"]
        metadata = {**template.get("metadata", {}), "name": each["name"]}
        job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata}
        _check_core({**job, "spec": template["spec"]})


def _check_core(document: Any) -> None:
    import kubernetes_validate

    kubernetes_validate.validate(document, VERSION, strict=True)


def check_model(model: Any, document: Any) -> None:
    """Checks an object by a pydantic model, which itself lets unknown fields pass."""
    unknown = unknown_fields(model, document)
    assert not unknown, unknown
    # Not model_validate, which knows no quantities.
    model.from_dict(document)


def unknown_fields(hint: Any, value: Any, path: str = "") -> list[str]:
    """Returns the paths of fields that a model does not have."""
    if hasattr(hint, "model_fields") and isinstance(value, dict):
        known = {field.alias or name: field.annotation for name, field in hint.model_fields.items()}
        found = [f"{path}.{key}" for key in value if known and key not in known]
        for key in value.keys() & known.keys():
            found += unknown_fields(known[key], value[key], f"{path}.{key}")
        return found
    if isinstance(value, list):
        return [
            each
            for inner in get_args(hint)
            for index, item in enumerate(value)
            for each in unknown_fields(inner, item, f"{path}[{index}]")
        ]
    if get_origin(hint) is dict:
        return []
    return [each for inner in get_args(hint) for each in unknown_fields(inner, value, path)]
