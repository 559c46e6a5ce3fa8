"""Optimizers that owners do not step, or not with other flags, are refused in one line (Muon: ``test_muon_flags``)."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import pytest

from megatron.elastic.config import ElasticConfig
from megatron.elastic.mcore.args import optimizers
from megatron.elastic.mcore.args.optimizers import optimizer_faults


def faults(version: str, patch: pytest.MonkeyPatch, **more: Any) -> list[str]:
    """Lines for Lion under a release."""
    patch.setattr(optimizers, "installed_version", lambda: version)
    return list(optimizer_faults(Namespace(optimizer="lion", **more), ElasticConfig()))


@pytest.mark.parametrize(("version", "known"), [("0.17.1", False), ("0.18.2", True), ("0.19.2", True)])
def test_lion_needs_a_release_that_has_its_settings(version: str, known: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    found = faults(version, monkeypatch)
    assert found == [] if known else "megatron-core 0.17.1" in found[0] and "0.18" in found[0]


@pytest.mark.parametrize(
    ("more", "named"),
    [({"fp16": True}, "--fp16"), ({"use_precision_aware_optimizer": True}, "--use-precision-aware-optimizer")],
)
def test_what_does_not_hold_with_lion(more: dict[str, Any], named: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (line,) = faults("0.19.2", monkeypatch, **more)
    assert line.startswith("--optimizer lion") and named in line and "\n" not in line
