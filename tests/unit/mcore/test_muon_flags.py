"""Muon's flags: taken over as Megatron means them; what does not hold with --elastic is refused in one line."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import pytest

from megatron.elastic.config import ElasticConfig
from megatron.elastic.mcore.args.arguments import config_from_args
from megatron.elastic.mcore.args.muon import muon_faults, muon_of, qkv_parts, snapshot_line
from megatron.elastic.state.muon import Muon


def asked(**more: Any) -> Namespace:
    """Arguments as Megatron parses them."""
    defaults = {
        "optimizer": "muon",
        "muon_momentum": 0.9,
        "muon_use_nesterov": False,
        "muon_scale_mode": "spectral",
        "muon_coefficient_type": "quintic",
        "muon_num_ns_steps": 5,
        "muon_extra_scale_factor": 1.0,
        "muon_fp32_matmul_prec": "medium",
        "muon_split_qkv": True,
        "muon_tp_mode": "blockwise",
        "muon_scalar_optimizer": "adam",
        "tensor_model_parallel_size": 1,
        "group_query_attention": True,
        "num_attention_heads": 8,
        "num_query_groups": 4,
        "kv_channels": 16,
    }
    return Namespace(**{**defaults, **more})


@pytest.mark.parametrize("name", ["muon", "dist_muon"])
def test_the_engine_takes_the_settings(name: str) -> None:
    args = asked(optimizer=name, muon_use_nesterov=True, muon_momentum=0.95, muon_num_ns_steps=7)
    assert not list(muon_faults(args, ElasticConfig()))
    assert muon_of(args) == Muon(0.95, True, iterations=7)
    assert muon_of(asked(optimizer="adam")) is None


def test_a_fused_weight_is_split_into_the_rows_of_a_group() -> None:
    assert qkv_parts(asked()) == (32, 16, 16)
    assert qkv_parts(asked(group_query_attention=False)) == (16, 16, 16)
    assert qkv_parts(asked(muon_split_qkv=False)) == qkv_parts(asked(optimizer="sgd")) == ()


def test_copies_receive_state_and_a_line_says_so_where_it_was_not_asked_for() -> None:
    args = asked(elastic_snapshot="gradient")
    assert config_from_args(args).snapshot == "state"
    line = snapshot_line(args, config_from_args(args))
    assert line.startswith("--optimizer muon: ") and "--elastic-snapshot state" in line and "\n" not in line
    assert not snapshot_line(asked(elastic_snapshot="state"), ElasticConfig(snapshot="state"))
    adam = asked(optimizer="adam", elastic_snapshot="gradient")
    assert config_from_args(adam).snapshot == "gradient" and not snapshot_line(adam, config_from_args(adam))


@pytest.mark.parametrize(
    ("given", "flag"),
    [
        ({"muon_coefficient_type": "cubic"}, "--muon-coefficient-type cubic"),
        ({"muon_fp32_matmul_prec": "low"}, "--muon-fp32-matmul-prec low"),
        ({"muon_num_ns_steps": 0}, "--muon-num-ns-steps 0"),
        ({"muon_scalar_optimizer": "lion"}, "--muon-scalar-optimizer lion"),
        ({"fp16": True}, "--optimizer muon with --fp16"),
        ({"use_precision_aware_optimizer": True}, "--optimizer muon with --use-precision-aware-optimizer"),
        ({"muon_tp_mode": "duplicated", "tensor_model_parallel_size": 2}, "--muon-tp-mode duplicated"),
        ({"muon_tp_mode": "distributed", "expert_tensor_parallel_size": 2}, "--muon-tp-mode distributed"),
        ({"tensor_model_parallel_size": 8}, "--optimizer muon splits query groups"),
        ({"attention_output_gate": True}, "--optimizer muon .* --attention-output-gate"),
        ({"heterogeneous_layers_config_path": "x"}, "--optimizer muon .* --heterogeneous-layers-config-path"),
    ],
)
def test_what_does_not_hold_is_refused_with_the_fix(given: dict[str, Any], flag: str) -> None:
    [fault] = muon_faults(asked(**given), ElasticConfig())
    assert flag.split(" .* ")[0] in fault and flag.split(" .* ")[-1] in fault and "\n" not in fault
    assert any(fix in fault for fix in (": use ", ": add ", "leave one of them out"))


def test_modes_that_need_other_parts_are_the_same_without_tensor_parallelism() -> None:
    for mode in ("duplicated", "distributed"):
        assert not list(muon_faults(asked(muon_tp_mode=mode), ElasticConfig()))


def test_exact_mode_is_refused() -> None:
    [fault] = muon_faults(asked(), ElasticConfig(exact=True))
    assert fault.startswith("--elastic-exact") and fault.endswith("leave one out")


def test_the_muon_of_a_later_release_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron.elastic.mcore.args.muon.installed_version", lambda: "0.18.2")
    [fault] = muon_faults(asked(), ElasticConfig())
    assert fault.startswith("--optimizer muon of megatron-core 0.18.2") and ": use release 0.17.1" in fault
