"""The function that builds a rank's part of the model, as the training script describes it to ``pretrain``.

A script gives Megatron a function that makes a model or, from megatron-core 0.19 on, a configuration whose builder
makes it. Megatron-LM's own ``pretrain_gpt.py`` of these releases gives a configuration.

Invariant: the part is that of the stage in ``parallel_state`` at the call, so another stage's can be built too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.training import get_args, training

__all__ = ["model_builder"]


def model_builder(call: Mapping[str, Any]) -> Callable[[], list[Any]]:
    """Return the function that builds the chunks of the present stage, not wrapped in DDP.

    ``call``: the arguments of Megatron's ``setup_model_and_optimizer``.
    """
    described = getattr(call.get("cfg_container"), "model", None)
    if described is not None:
        return lambda: _of_description(described)
    return lambda: training.get_model(call["model_provider_func"], call["model_type"], wrap_with_ddp=False)


def _of_description(described: Any) -> list[Any]:
    """Return the chunks that the builder of a ``GPTModelConfig`` makes of it; values as the arguments say now."""
    config, build = described.transformer, described.get_builder_cls()(described).build_distributed_models
    before, config.perform_initialization = config.perform_initialization, get_args().perform_initialization
    try:
        groups = ProcessGroupCollection.use_mpu_process_groups()
        return build(pg_collection=groups, wrap_with_ddp=False)  # type: ignore[no-any-return]
    finally:
        config.perform_initialization = before
