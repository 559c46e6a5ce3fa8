"""Units of a GPT that are built anew, beside those that Megatron has built.

    python tests/unit/mcore/built_units.py OUT.json

Written for ``test_unit_builder.py``: this import redirects CUDA for the whole process.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from tests.unit.mcore.crew_layers import Dealt
from tests.unit.small_gpt import answers_of, gpt, gpt_config

# isort: split

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

from megatron.elastic.mcore.model.layer_specs import LayerSpecs
from megatron.elastic.mcore.model.unit_builder import BuildSite, UnitBuilder

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


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps({str(size): answers_of(Dealt((), (), size), built) for size in (1, 2)}))
