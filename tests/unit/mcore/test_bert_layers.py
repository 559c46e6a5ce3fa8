"""BERT is built of Megatron's own layers where Transformer Engine is missing, and of its layers where it is there."""

from __future__ import annotations

import pytest
from megatron.core.models.bert import bert_layer_specs

from megatron.elastic.mcore.model.bert_layers import make_layer_spec


def engine_layers() -> str:
    return "layers of Transformer Engine"


@pytest.mark.parametrize("present", [False, True])
def test_layers_follow_what_is_installed(present: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bert_layer_specs, "HAVE_TE", present)
    made = make_layer_spec(engine_layers)
    assert made() == (engine_layers() if present else bert_layer_specs.bert_layer_local_spec)
