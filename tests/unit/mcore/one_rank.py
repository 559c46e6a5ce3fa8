"""Parts of Megatron's side on one rank, with Megatron's own objects: units, optimizer, batches, default group.

    python tests/unit/mcore/one_rank.py OUT.json

Written for ``test_one_rank.py``: this import redirects CUDA for the whole process.
"""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from tests.unit.small_gpt import LENGTH, VOCABULARY, answers_of, gpt, gpt_config

# isort: split

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.training import global_vars, training

from megatron.elastic.mcore.checkpoint.state_dict import without_holes
from megatron.elastic.mcore.model import torch_adam
from megatron.elastic.mcore.model.latent_attention import make_two_widths
from megatron.elastic.mcore.model.layer_specs import LayerSpecs
from megatron.elastic.mcore.model.packed_sequences import make_packed
from megatron.elastic.mcore.model.units import Anatomy, unwrapped
from megatron.elastic.mcore.patching import compat

LAYERS = 3
UNITS = LAYERS + 2


@dataclass(frozen=True)
class Case:
    """One check."""

    check: str
    tied: bool = False
    tensor_parallel: int = 1
    sequence_parallel: bool = False


def units(case: Case) -> dict[str, Any]:
    """Give up all but some units, and take them back."""
    model = gpt(gpt_config(case, LAYERS, 0.0), case.tied)
    prepared: list[object] = []
    specs = LayerSpecs.of([model], Namespace())
    anatomy = Anatomy([model], lambda inner, module, place: prepared.append(module), specs)
    names = {unit: sorted(name for name, _ in anatomy.named_parameters(unit)) for unit in anatomy.held()}
    whole = sum(p.numel() for p in model.parameters())
    tokens = torch.arange(LENGTH).reshape(1, LENGTH) % VOCABULARY
    inputs = (tokens, torch.arange(LENGTH).reshape(1, LENGTH), None)
    logits = model(*inputs)
    same = torch.equal(anatomy.segment(0, UNITS)(*inputs), logits)
    values = {name: p.detach().clone() for unit in names for name, p in anatomy.named_parameters(unit)}
    tied = anatomy.tied_parameter() if case.tied else None
    shared = None if tied is None else tied.detach().clone()
    anatomy.hold((1, 2))
    kept = sum(p.numel() for p in model.parameters())
    try:
        anatomy.segment(0, 2)
        missing = ""
    except KeyError as error:
        missing = str(error)
    with anatomy.as_launched():
        launched = sum(p.numel() for p in model.parameters())
    after = sum(p.numel() for p in model.parameters())
    gone = anatomy.tied_parameter() is None
    anatomy.hold((0, 1, 2, 3, UNITS - 1))
    again = {unit: sorted(name for name, _ in anatomy.named_parameters(unit)) for unit in anatomy.held()}
    for unit in anatomy.held():
        for name, parameter in anatomy.named_parameters(unit):
            parameter.data = values[name]
    if tied is not None and shared is not None:
        tied.data = shared
    return {
        "held": list(anatomy.held()),
        "same": same,
        "names kept": names == again,
        "whole": whole,
        "kept": kept,
        "two layers": sum(values[name].numel() for unit in (1, 2) for name in names[unit]),
        "as launched": launched,
        "after": after,
        "missing": missing,
        "same again": torch.equal(anatomy.segment(0, UNITS)(*inputs), logits),
        "built": len(prepared),
        "tied gone": gone,
        "is the model": unwrapped(model) is model,
    }


def adam(case: Case) -> dict[str, Any]:
    """A resumed distributed optimizer over torch's Adam counts one a step, with the replacements and without."""
    del case
    return {"replaced": _counts(True), "plain": _counts(False)}


def _counts(replaced: bool) -> dict[str, Any]:
    makes: dict[str, Callable[..., Any]] = {
        "state_dict": torch_adam.make_state_dict,
        "load_state_dict": torch_adam.make_load_state_dict,
        "_set_main_param_and_optimizer_states": torch_adam.make_set_states,
    }
    with (
        mock.patch.multiple(
            DistributedOptimizer,
            **{name: make(getattr(DistributedOptimizer, name)) for name, make in makes.items() if replaced},
        )
        if replaced
        else mock.MagicMock()
    ):
        first, second = _optimizer(), _optimizer()
        try:
            early = first.state_dict()["optimizer"]["param_groups"][0]["step"]
        except Exception as error:
            return {"error": type(error).__name__}
        for _ in range(2):
            _step(first)
        second.load_state_dict(first.state_dict())
        for _ in range(3):
            _step(second)
        steps = [float(state["step"]) for state in second.optimizer.state.values()]
        return {"early": int(early), "steps": steps}


def _optimizer() -> Any:
    config = gpt_config(Case("adam"), 1, 0.0)
    model = DistributedDataParallel(
        config,
        DistributedDataParallelConfig(use_distributed_optimizer=True),
        gpt(config, False),
    )
    made = get_megatron_optimizer(
        OptimizerConfig(optimizer="adam", lr=1e-3, use_distributed_optimizer=True, params_dtype=torch.float32), [model]
    )
    return made.chained_optimizers[0] if hasattr(made, "chained_optimizers") else made


def _step(optimizer: Any) -> None:
    for group in optimizer.optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter)
    optimizer.optimizer.step()


def batches(case: Case) -> dict[str, Any]:
    """The script's functions for batches and for ``pretrain``, on the installed release."""
    del case
    args = Namespace(
        micro_batch_size=2,
        seq_length=4,
        create_attention_mask_in_dataloader=False,
        context_parallel_size=1,
        hybrid_context_parallel=False,
        sft=False,
        pipeline_model_parallel_size=1,
    )
    text = torch.arange(10).reshape(2, 5)
    data = {"tokens": text[:, :-1], "labels": text[:, 1:], "loss_mask": torch.ones(2, 4), "position_ids": text[:, :-1]}
    with mock.patch.object(global_vars, "_GLOBAL_ARGS", args):
        found = compat.batch_on_this_rank(iter([data]), True, True, False)
    calls = list[dict[str, Any]]()

    def old(model_provider: Any, model_type: Any, forward_step_func: Any, args_defaults: Any) -> None:
        calls.append({"model": model_provider, "step": forward_step_func, "defaults": args_defaults})

    with mock.patch.object(training, "pretrain", old):
        compat.run("data", "model", "step", {"lr": 1})  # type: ignore[arg-type]
    return {
        "same": {key: torch.equal(found[key], data[key]) for key in data},  # type: ignore[arg-type]
        "mask": found["attention_mask"] is None,
        "calls": calls,
    }


def default_group(case: Case) -> dict[str, Any]:
    """The default group inside and after a save by the living alone."""
    del case
    world = dist.group.WORLD
    alone = dist.new_group([0])
    asked: list[object] = []

    def group(name: str, living: list[int]) -> Any:
        asked.append([name, living])
        return alone

    fabric: Any = SimpleNamespace(alive=(0, 2), slots=2, group=group, world=world)
    numbers = parallel_state.get_data_parallel_rank()
    try:
        with without_holes(fabric, 2):
            inside = dist.group.WORLD is alone and dist.get_rank() == 0 and dist.get_world_size() == 1
            raise LookupError
    except LookupError:
        pass
    whole: Any = SimpleNamespace(alive=(0,), slots=1, group=None, world=world)
    with without_holes(whole, 1):
        untouched = dist.group.WORLD is world
    return {
        "asked": asked,
        "inside": inside,
        "after": dist.group.WORLD is world and parallel_state.get_data_parallel_rank() == numbers,
        "untouched": untouched,
    }


def latent(case: Case) -> dict[str, Any]:
    """Megatron's local attention with keys of one width and values of another, beside the formula."""
    config = gpt_config(case, LAYERS, 0.0)
    keys, values, heads = 12, 6, config.num_attention_heads
    usual = DotProductAttention(config, 1, AttnMaskType.causal, "self")
    scale = 0.25
    with mock.patch.object(DotProductAttention, "__init__", make_two_widths(DotProductAttention.__init__)):
        built = DotProductAttention(
            config, 1, AttnMaskType.causal, "self", softmax_scale=scale, k_channels=keys, v_channels=values
        )
        plain = DotProductAttention(config, 1, AttnMaskType.causal, "self")
    query, key = torch.randn(2, LENGTH, 1, heads, keys)
    value = torch.randn(LENGTH, 1, heads, values)
    mask = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool).triu(1)
    scores = torch.einsum("ibhd,jbhd->bhij", query, key).mul(scale).masked_fill(mask, float("-inf"))
    expected = torch.einsum("bhij,jbhd->ibhd", scores.softmax(-1), value).reshape(LENGTH, 1, heads * values)
    output = built(query, key, value, mask)
    return {
        "shape": list(output.shape) == [LENGTH, 1, heads * values],
        "apart": float((output - expected).abs().max()),
        "configured": built.config is config and config.kv_channels == usual.config.kv_channels,
        "one width": plain.hidden_size_per_partition == usual.hidden_size_per_partition,
    }


def packed(case: Case) -> dict[str, Any]:
    """A packed row through Megatron's model, and each of its sequences through it alone: outputs and gradients."""
    config, ends = gpt_config(case, LAYERS, 0.0), [0, 3, 4, 11, LENGTH]
    with mock.patch.object(DotProductAttention, "forward", make_packed(DotProductAttention.forward)):
        model = gpt(config, tied=True, position_embedding_type="rope")
        tokens = torch.randint(VOCABULARY, (1, LENGTH))
        places = torch.tensor([[place - start for start, stop in pairwise(ends) for place in range(start, stop)]])
        weights = torch.randn(LENGTH, VOCABULARY)
        bounds = torch.tensor(ends, dtype=torch.int32)
        row = PackedSeqParams("thd", bounds, bounds, max_seqlen_q=7, max_seqlen_kv=7)

        def gradients() -> list[torch.Tensor]:
            found = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
            model.zero_grad()
            return found

        together = model(tokens, places, None, packed_seq_params=row)[0]
        (together * weights).sum().backward()
        of_row = gradients()
        alone = torch.cat([model(tokens[:, a:b], places[:, a:b], None)[0] for a, b in pairwise(ends)])
        (alone * weights).sum().backward()
        of_parts = gradients()
        one = model(tokens, torch.arange(LENGTH)[None], None)[0]
    return {
        "apart": float((together - alone).detach().abs().max()),
        "gradients apart": max(float((a - b).abs().max()) for a, b in zip(of_row, of_parts, strict=True)),
        "as one sequence": float((together - one).detach().abs().max()),
    }


CHECKS = {
    "packed": packed,
    "units": units,
    "adam": adam,
    "batches": batches,
    "default group": default_group,
    "latent": latent,
}
CASES = (
    *(Case("units"), Case("units", tied=True)),
    *(Case("adam"), Case("batches"), Case("default group"), Case("latent"), Case("packed")),
)


def compute(case: Case) -> dict[str, Any]:
    return CHECKS[case.check](case)


def main(out: str) -> None:
    found = [[case.check, case.tied, answers_of(case, compute)[0]] for case in CASES]
    Path(out).write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
