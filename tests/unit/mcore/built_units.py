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
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

from megatron.elastic.engine.compute.model_interface import Crew
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


def redealt(case: Dealt) -> dict[str, Any]:
    """Give a layer with all experts to a crew in which this rank has fewer, and to one in which it has as many."""
    sizes: dict[str, Any] = {
        "num_moe_experts": EXPERTS,
        "moe_router_topk": 2,
        "moe_ffn_hidden_size": 16,
        "add_bias_linear": False,
    }
    model: Any = gpt(gpt_config(case, 1, 0.0, **sizes), tied=False)
    told: list[torch.nn.Module] = []
    specs = LayerSpecs((get_gpt_layer_local_spec(num_experts=EXPERTS),))
    builder = UnitBuilder(model, model, 3, specs, lambda inner, module, place: told.append(module))
    born = builder.build(1, BuildSite.of(model, None), training=True)
    group, position = parallel_state.get_tensor_model_parallel_group(), Position(0, 1)
    sizes_of_all, found = Sizes.of(model.config, VOCABULARY, LENGTH), dict[str, Any]()
    for name, mine in {"fewer": (0, 3), "as many": tuple(range(EXPERTS))}.items():
        crew = Crew((0, 1), (mine, (1, 2)))
        place = TensorPlace(position, group, sizes_of_all, 0, crew, launched=True)
        told.clear()
        layer = builder.with_experts(1, born, BuildSite.of(model, place), training=True)["decoder.layers.0"]
        before = dict(born["decoder.layers.0"].named_parameters())
        found[name] = {
            "experts": [len(one.mlp.experts.local_experts) for one in (layer, born["decoder.layers.0"])],
            "indices": layer.mlp.local_expert_indices,
            "kept": [key for key, value in layer.named_parameters() if value is before.get(key)],
            "all": list(before),
            "told": [type(one).__name__ for one in told],
        }
    return found


if __name__ == "__main__":
    answers: dict[str, Any] = {str(size): answers_of(Dealt((), (), size), built) for size in (1, 2)}
    answers["redealt"] = answers_of(Dealt((), (), 1), redealt)[0]
    Path(sys.argv[1]).write_text(json.dumps(answers))
