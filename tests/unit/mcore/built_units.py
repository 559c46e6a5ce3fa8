"""Units of a GPT that are built anew, beside those that Megatron has built.

    python tests/unit/mcore/built_units.py OUT.json

Written for ``test_unit_builder.py``: this import redirects CUDA for the whole process.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from tests.unit.mcore.crew_layers import EXPERTS, Dealt
from tests.unit.small_gpt import LENGTH, VOCABULARY, answers_of, gpt, gpt_config

# isort: split

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec, get_gpt_mtp_block_spec

from megatron.elastic.engine.compute.model_interface import Crew
from megatron.elastic.mcore.model.expert_homes import layers_with_experts
from megatron.elastic.mcore.model.layer_specs import LayerSpecs
from megatron.elastic.mcore.model.tensor_cut import Sizes
from megatron.elastic.mcore.model.tensor_place import TensorPlace
from megatron.elastic.mcore.model.unit_builder import BuildSite, UnitBuilder
from megatron.elastic.state.coverage import Position

LAYERS = 2


def described(modules: dict[str, torch.nn.Module]) -> dict[str, tuple[list[int], str, bool]]:
    """Return parameter → shape, type, and whether ranks of a tensor-parallel group have parts of it."""
    return {
        f"{path}.{name}": (list(item.shape), str(item.dtype), bool(getattr(item, "tensor_model_parallel", False)))
        for path, module in modules.items()
        for name, item in module.named_parameters()
    }


def built(case: Dealt) -> dict[str, Any]:
    """Build each unit of a model, training and not."""
    model: Any = gpt(gpt_config(case, LAYERS, 0.0), tied=False)
    told: list[int] = []
    specs = LayerSpecs((get_gpt_layer_local_spec(),) * LAYERS)
    builder = UnitBuilder(model, model, LAYERS + 2, specs, lambda inner, module, place: told.append(id(module)))
    site, units = BuildSite.of(model, None), dict[str, torch.nn.Module]()
    for unit in range(LAYERS + 2):
        units |= builder.build(unit, site, training=unit > 0)
    return {
        "built": described(units),
        "megatron": described({path: model.get_submodule(path) for path in ("embedding", "decoder", "output_layer")}),
        "training": {path: module.training for path, module in units.items()},
        "told": told == [id(module) for module in units.values()],
    }


def parameters_of(modules: dict[str, torch.nn.Module]) -> dict[str, torch.nn.Parameter]:
    return {f"{path}.{name}": item for path, one in modules.items() for name, item in one.named_parameters()}


def redealt(case: Dealt) -> dict[str, Any]:
    """Give units with all experts to a crew in which this rank has fewer, and to one in which it has as many.

    One is a layer, the other a head with two layers of further tokens.
    """
    sizes: dict[str, Any] = {
        "num_moe_experts": EXPERTS,
        "moe_router_topk": 2,
        "moe_ffn_hidden_size": 16,
        "add_bias_linear": False,
        "mtp_num_layers": 2,
    }
    config = gpt_config(case, 1, 0.0, **sizes)
    model: Any = gpt(config, tied=False)
    told: list[torch.nn.Module] = []
    spec = get_gpt_layer_local_spec(num_experts=EXPERTS)
    specs = LayerSpecs((spec,), get_gpt_mtp_block_spec(config, spec, False))
    builder = UnitBuilder(model, model, 3, specs, lambda inner, module, place: told.append(module))
    units = {"decoder.layers.0": 1, "mtp": 2}
    born = {path: builder.build(unit, BuildSite.of(model, None), training=True) for path, unit in units.items()}
    group, position = parallel_state.get_tensor_model_parallel_group(), Position(0, 1)
    sizes_of_all, found = Sizes.of(model.config, VOCABULARY, LENGTH), dict[str, Any]()
    for name, mine in {"fewer": (0, 3), "as many": tuple(range(EXPERTS))}.items():
        crew = Crew((0, 1), (mine, (1, 2)))
        place = TensorPlace(position, group, sizes_of_all, 0, crew, launched=True)
        site = BuildSite.of(model, place)
        for path, unit in units.items():
            told.clear()
            dealt, given = builder.with_experts(unit, born[path], site, training=True), born[path]
            before = parameters_of(given)
            new, old = layers_with_experts(dealt[path]), layers_with_experts(given[path])
            found[f"{path}, {name}"] = {
                "experts": [[len(one.experts.local_experts) for one in layers] for layers in (new, old)],
                "indices": [one.local_expert_indices for one in new],
                "kept": [key for key, value in parameters_of(dealt).items() if value is before.get(key)],
                "all": list(before),
                "told": [type(one).__name__ for one in told],
            }
    return found


if __name__ == "__main__":
    answers: dict[str, Any] = {str(size): answers_of(Dealt((), (), size), built) for size in (1, 2)}
    answers["redealt"] = answers_of(Dealt((), (), 1), redealt)[0]
    Path(sys.argv[1]).write_text(json.dumps(answers))
