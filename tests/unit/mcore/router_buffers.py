"""Bias and counts of real routers, set and read by unit.

    python tests/unit/mcore/router_buffers.py OUT.json

Written for ``test_router_bias.py``: this import redirects CUDA for the whole process.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from tests.unit.small_gpt import answers_of, gpt_config

# isort: split

import torch
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
from megatron.core.transformer.moe.router import TopKRouter

from megatron.elastic.mcore.model.prediction import further_unit
from megatron.elastic.mcore.model.router_bias import counted_tokens, forget_tokens, present_bias, set_bias
from tests.unit.mcore.crew_layers import Dealt

EXPERTS = 4


def router(layer: int, biased: bool, dtype: torch.dtype, further: bool = False) -> Any:
    """Return the router of one layer, numbered from 1 as Megatron does; ``further``: of those behind the model's."""
    more: dict[str, Any] = {
        "num_moe_experts": EXPERTS,
        "moe_router_topk": 2,
        "moe_router_score_function": "sigmoid" if biased else "softmax",
        "moe_router_enable_expert_bias": biased,
        "moe_router_load_balancing_type": "none",
    }
    made = TopKRouter(gpt_config(Dealt((), ()), 1, 0.0, dtype=dtype, **more), get_default_pg_collection(), further)
    made.set_layer_number(layer)
    return made


def buffers(case: Dealt) -> dict[str, Any]:
    """Count tokens of a model with three biased routers and one without, and replace their bias.

    The last one's layer predicts the token after the next, and has the number of the first one's.
    """
    biased = {2: True, 3: False, 5: True}
    made: Any = torch.nn.ModuleList([router(layer, has, case.dtype) for layer, has in biased.items()])
    made.append(router(2, True, case.dtype, further=True))
    before: torch.Tensor = made[0].expert_bias
    behind = further_unit(made[-1].config, 2)
    set_bias(made, {2: (9.0, 8.0, 0.0, 0.0), 5: (0.0, 0.0, 8.0, 9.0), behind: (0.0, 9.0, 8.0, 0.0)})
    forget_tokens(made)
    for one in made:
        one(torch.randn(3, 2, 32).to(case.dtype))
    counted = counted_tokens(made)
    forget_tokens(made)
    return {
        "behind": behind,
        "bias": present_bias(made),
        "written": before.tolist(),
        "types": [str(buffer.dtype) for buffer in (made[0].expert_bias, made[0].local_tokens_per_expert)],
        "counted": counted,
        "forgotten": counted_tokens(made),
    }


if __name__ == "__main__":
    types = (torch.float32, torch.bfloat16)
    found = {str(dtype): answers_of(Dealt((), (), dtype=dtype), buffers)[0] for dtype in types}
    Path(sys.argv[1]).write_text(json.dumps(found))
