"""Checks Kubernetes manifests against the schemas that their projects publish.

``python tests/integration/schemas.py FILE ...`` prints a JSON object a document: its kind, and what the schema refuses.

Kubernetes' own kinds: the JSON schemas of a release, with unknown fields refused. JobSet and Kubeflow Trainer: the
models that Trainer's project generates from the definitions of its resources; they pass over unknown fields, so a
document must come back from them as it was. The packages are in ``requirements/manifests.txt``.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubeflow_trainer_api.models
import kubernetes_validate
import yaml
from pydantic import ValidationError

RELEASE = "1.37"
CORE = ("v1", "apps/v1", "batch/v1", "policy/v1")
MODELS = {"jobset.x-k8s.io/v1alpha2": "JobsetV1alpha2", "trainer.kubeflow.org/v1alpha1": "TrainerV1alpha1"}


def refusals(document: Any) -> list[str]:
    """One line a fault. Raises ``KeyError`` for a kind that has no schema here."""
    version, kind = document["apiVersion"], document["kind"]
    if version in CORE:
        try:
            kubernetes_validate.validate(document, RELEASE, strict=True)
        except kubernetes_validate.ValidationError as error:
            return [str(error)]
        return []
    model = getattr(kubeflow_trainer_api.models, f"{MODELS[version]}{kind}")
    try:
        return list(missing(document, model.from_dict(document).to_dict(), kind))
    except ValidationError as error:
        return [str(error)]


def missing(given: Any, kept: Any, where: str) -> Iterator[str]:
    """The places of ``given`` that ``kept`` has not, or has otherwise."""
    if isinstance(given, dict) and isinstance(kept, dict):
        for key, value in given.items():
            if key in kept:
                yield from missing(value, kept[key], f"{where}.{key}")
            else:
                yield f"{where}.{key}: no such field"
    elif isinstance(given, list) and isinstance(kept, list) and len(given) == len(kept):
        for number, (one, other) in enumerate(zip(given, kept, strict=True)):
            yield from missing(one, other, f"{where}[{number}]")
    elif given != kept:
        yield f"{where}: {given!r} is read as {kept!r}"


if __name__ == "__main__":
    for path in map(Path, sys.argv[1:]):
        for each in yaml.safe_load_all(path.read_text(encoding="utf-8")):
            print(json.dumps({"file": path.name, "kind": each["kind"], "refused": refusals(each)}))
