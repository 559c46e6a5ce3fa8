"""A setting that a machine cannot honour is substituted, listed, and refused on demand: never changed in silence."""

from __future__ import annotations

import importlib.util
import re
from argparse import Namespace
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.elastic.mcore.args.bad_input import BadInput
from megatron.elastic.mcore.args.substitutions import (
    ELASTIC_ROWS,
    ROWS,
    Installed,
    Rule,
    refuse,
    substitute,
    table,
)


class Backend(Enum):
    """Stands for Megatron's AttnBackend."""

    flash = 1
    unfused = 2
    auto = 3


CPU = Installed("cpu")
EVERYTHING = frozenset(need for row in ROWS for need in row.needs)
GPU = Installed("cuda", EVERYTHING)


def defaults(**given: Any) -> Namespace:
    """Megatron's defaults for the attributes the rows speak of."""
    args = {
        "transformer_impl": "transformer_engine",
        "distributed_backend": "nccl",
        "attention_backend": Backend.auto,
        "use_cpu_initialization": False,
        "gradient_accumulation_fusion": True,
        "no_persist_layer_norm": False,
        "bias_gelu_fusion": True,
        "bias_swiglu_fusion": True,
        "bias_dropout_fusion": True,
        "masked_softmax_fusion": True,
        "apply_rope_fusion": True,
        "cuda_graph_impl": "none",
        "pipeline_model_parallel_comm_backend": None,
        "cpu_offloading_num_layers": 0,
        "async_strategy": "nvrx",
    }
    return Namespace(**{**args, **given})


def test_on_a_cpu_megatrons_gpu_defaults_are_substituted_and_listed() -> None:
    args = defaults()
    changed = substitute(args, CPU)
    assert (args.transformer_impl, args.distributed_backend) == ("local", "gloo")
    assert not (args.gradient_accumulation_fusion or args.apply_rope_fusion or args.masked_softmax_fusion)
    text = table(changed, "title")
    assert text.splitlines()[0] == "title:"
    assert len(text.splitlines()) == 2 + len(changed)
    assert all(line.row.flag in text and line.row.reason[:20] in text for line in changed)


def test_with_everything_here_nothing_is_touched() -> None:
    args = defaults()
    assert substitute(args, GPU) == () and vars(args) == vars(defaults())
    assert table((), "title") == ""


def test_substituting_twice_changes_nothing_the_second_time() -> None:
    args = defaults(attention_backend=Backend.flash)
    assert substitute(args, CPU)
    assert substitute(args, CPU) == ()


def test_an_enumeration_stays_one() -> None:
    args = defaults(attention_backend=Backend.flash)
    substitute(args, CPU)
    assert args.attention_backend is Backend.unfused
    untouched = defaults(attention_backend=Backend.auto)
    substitute(untouched, CPU)
    assert untouched.attention_backend is Backend.auto


@pytest.mark.parametrize("grouped", [True, False])
def test_activations_that_only_grouped_experts_recompute_are_kept_without_them(grouped: bool) -> None:
    args = defaults(moe_grouped_gemm=grouped, recompute_modules=["layernorm", "moe_act", "mlp"])
    assert "without moe_act" in table(substitute(args, CPU), "title")
    assert "moe_act" not in args.recompute_modules and "mlp" in args.recompute_modules and not args.moe_grouped_gemm
    there = defaults(moe_grouped_gemm=True, recompute_modules=["moe_act"])
    assert substitute(there, GPU) == ()


def test_norms_that_only_transformer_engine_recomputes_are_kept_without_it() -> None:
    args = defaults(recompute_modules=["layernorm", "core_attn"])
    assert "without layernorm" in table(substitute(args, CPU), "title") and args.recompute_modules == ["core_attn"]
    there = defaults(recompute_modules=["layernorm"])
    substitute(there, GPU)
    assert there.recompute_modules == ["layernorm"]


def test_strict_flags_refuse_in_one_line_that_spells_the_fix() -> None:
    changed = substitute(defaults(use_flash_attn=True), CPU)
    with pytest.raises(BadInput) as caught:
        refuse(changed)
    text = str(caught.value)
    assert "\n" not in text
    assert "--transformer-impl local" in text and "leave out --use-flash-attn" in text
    refuse(())


def test_following_the_fix_leaves_nothing_to_refuse() -> None:
    args = defaults()
    for line in substitute(defaults(), CPU):
        setattr(args, line.row.attribute, line.row.used)
    assert substitute(args, CPU) == ()


@given(st.sets(st.sampled_from([row.attribute for row in ROWS])), st.booleans())
def test_every_changed_attribute_has_its_line(names: set[str], switched: bool) -> None:
    """Whatever is asked: attributes that differ afterwards are exactly those listed."""
    before = {row.attribute: switched for row in ROWS if row.attribute in names}
    args = Namespace(**before)
    listed = {line.row.attribute for line in substitute(args, CPU)}
    assert {name for name in before if getattr(args, name) is not before[name]} == listed


def test_tuning_flags_are_taken_out_under_elastic_only_where_they_say_something() -> None:
    args = Namespace(
        delay_wgrad_compute=True,
        defer_embedding_wgrad_compute=False,
        num_distributed_optimizer_instances=1,
        rerun_mode="validate_results",
        ddp_num_buckets=None,
    )
    listed = [line.row.flag for line in substitute(args, GPU, ELASTIC_ROWS)]
    assert listed == ["--delay-wgrad-compute", "--rerun-mode"]
    assert not args.delay_wgrad_compute and args.rerun_mode == "disabled"


@pytest.mark.parametrize(
    ("attribute", "asked", "used"),
    [
        ("moe_token_dispatcher_type", "flex", "alltoall"),
        ("moe_enable_deepep", True, False),
        ("symmetric_ar_type", "two_shot", None),
        ("sharp_enabled_group", "dp", None),
        ("high_priority_stream_groups", ["dp"], []),
    ],
)
def test_what_only_kernels_of_a_gpu_can_do_is_substituted(attribute: str, asked: Any, used: Any) -> None:
    args = Namespace(**{attribute: asked})
    assert len(substitute(args, CPU)) == 1 and getattr(args, attribute) == used
    there = Namespace(**{attribute: asked})
    assert substitute(there, GPU) == () and getattr(there, attribute) == asked


def test_another_dispatcher_stays_on_a_cpu() -> None:
    assert substitute(Namespace(moe_token_dispatcher_type="allgather", moe_enable_deepep=False), CPU) == ()


@pytest.mark.parametrize(
    ("attribute", "asked", "used"),
    [
        ("moe_token_dispatcher_type", "flex", "alltoall"),
        ("moe_enable_deepep", True, False),
        ("tp_comm_overlap", True, False),
        ("symmetric_ar_type", "two_shot", None),
        ("ep_overlap_early_attn_memory_release", True, False),
        ("wgrad_deferral_limit", 2, 0),
        ("align_grad_reduce", False, True),
        ("align_param_gather", False, True),
        ("high_priority_stream_groups", ["dp"], []),
        ("mtp_standalone", True, False),
        ("ddp_reduce_scatter_with_fp32_accumulation", True, False),
        ("ddp_param_name_patterns_for_fp32_local_accumulation", ["*"], []),
        ("flight_recorder_dump_path", "there", None),
    ],
)
def test_what_tunes_megatrons_own_step_is_taken_out_under_elastic(attribute: str, asked: Any, used: Any) -> None:
    args = Namespace(**{attribute: asked})
    assert len(substitute(args, GPU, ELASTIC_ROWS)) == 1 and getattr(args, attribute) == used
    assert substitute(args, GPU, ELASTIC_ROWS) == ()


def test_checkpoints_fit_any_size_under_elastic_where_the_optimizer_is_distributed() -> None:
    """Megatron's default form fits one data-parallel size: a rank's state would have no place after a loss."""
    for distributed in (True, False):
        args = Namespace(dist_ckpt_optim_fully_reshardable=False, use_distributed_optimizer=distributed)
        substitute(args, Installed("cpu"), ELASTIC_ROWS)
        assert args.dist_ckpt_optim_fully_reshardable is distributed


def test_rows_are_distinct_and_say_why() -> None:
    for rows in (ROWS, ELASTIC_ROWS):
        assert len({row.flag for row in rows}) == len(rows)
        assert all(row.reason and row.flag.startswith("--") for row in rows)


def test_a_row_needs_all_of_its_needs() -> None:
    row = Rule("fused", "--fused", ("apex", "cuda"), bool, False, "leave it out", "two needs")
    for machine, kept in ((Installed("cuda"), False), (Installed("cuda", frozenset({"apex"})), True), (CPU, False)):
        args = Namespace(fused=True)
        substitute(args, machine, [row])
        assert args.fused is kept


@pytest.mark.parametrize(
    ("module", "attribute"),
    [
        ("tensor_parallel.layers", "gradient_accumulation_fusion"),
        ("fusions.fused_layer_norm", "no_persist_layer_norm"),
        ("fusions.fused_softmax", "masked_softmax_fusion"),
    ],
)
def test_what_a_row_needs_of_apex_is_what_megatron_imports(module: str, attribute: str) -> None:
    """No registry has a wheel of NVIDIA's Apex: these are the names that it is asked for."""
    spec = importlib.util.find_spec("megatron.core")
    assert spec is not None and spec.submodule_search_locations
    source = Path(spec.submodule_search_locations[0], *module.split(".")).with_suffix(".py").read_text()
    imported = set(re.findall(r"^\s+(?:import|from) (\w+)", source, re.MULTILINE))
    (needs,) = (row.needs for row in ROWS if row.attribute == attribute)
    assert set(needs) <= imported


def test_another_accelerator_keeps_its_own_initial_values_and_collectives() -> None:
    for platform, backend in (("npu", "nccl"), ("standin", "gloo")):  # torch_npu gives HCCL the name of NCCL
        args = defaults()
        substitute(args, Installed(platform))
        assert (args.use_cpu_initialization, args.distributed_backend) == (False, backend)
        assert args.bias_gelu_fusion is False, "compiled for GPUs"
