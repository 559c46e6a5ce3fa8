"""New modules for units of Megatron's GPTModel, built from the specifications of its layers.

Invariant: parameters have the names, tensor-parallel attributes and types that Megatron gives them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from megatron.core.utils import get_pg_rank

from megatron.elastic.mcore.model.expert_homes import layers_with_experts
from megatron.elastic.mcore.model.layer_specs import LayerSpecs, config_of_layer, without_references
from megatron.elastic.mcore.model.prediction import build_prediction, final_norm_unit
from megatron.elastic.mcore.model.tensor_place import TensorPlace

__all__ = ["BuildSite", "Modules", "UnitBuilder", "copy_with"]

Modules = dict[str, Any]
"""Modules of one unit by their path in the model: ``embedding``, ``decoder.layers.<n>``, ``output_layer``, …"""


@dataclass(frozen=True)
class BuildSite:
    """The configurations, groups and vocabulary size with which Megatron builds and runs the modules of one place."""

    place: TensorPlace | None
    model: Any
    layers: Any
    groups: Any
    building: Any
    """The groups with which modules are built: stand-ins, so that no group needs its members yet."""
    vocabulary: int

    @classmethod
    def of(cls, inner: Any, place: TensorPlace | None) -> BuildSite:
        config, groups = inner.config, inner.pg_collection
        if place is None:
            return cls(None, config, config, groups, groups, inner.vocab_size)
        if place.launched:
            return cls(place, config, config, groups, place.building_groups(groups), inner.vocab_size)
        return cls(
            place,
            place.cell_config(config),
            place.layer_config(config),
            place.groups(groups),
            place.building_groups(groups),
            place.vocabulary,
        )


@dataclass(frozen=True)
class UnitBuilder:
    """Builds the units of one model. ``first``: its first chunk; ``inner``: the GPTModel in it."""

    first: torch.nn.Module
    inner: Any
    units: int
    layer_specs: LayerSpecs
    prepare: Callable[[Any, torch.nn.Module, TensorPlace | None], object]
    """Is told of every module that is built, and for which place."""

    def build(self, unit: int, site: BuildSite, training: bool) -> Modules:
        """Return new modules for ``unit``, on the device and in the type of the chunks; values undefined."""
        with _without_values(site.model, site.layers):
            if unit == 0:
                modules = {"embedding": self._embedding(site)}
            elif unit == self.units - 1:
                modules = self._head(site)
            else:
                modules = {f"decoder.layers.{unit - 1}": self._layer(unit, site)}
                if unit == final_norm_unit(site.model, self.units):
                    modules["decoder.final_layernorm"] = self._final_norm(site)
        for module in modules.values():
            self._finish(module, site, training)
        return modules

    def with_experts(self, unit: int, modules: Modules, site: BuildSite, training: bool) -> Modules:
        """Return the modules of ``unit`` with the experts of another crew; all else is that of ``modules``.

        For a rank in its cell of the launch, whose crew lost a rank: it builds a few experts and no layer.
        """
        return {path: self._redealt(module, site, training) for path, module in modules.items()}

    def _redealt(self, module: Any, site: BuildSite, training: bool) -> Any:
        before = layers_with_experts(module)
        if not before:
            return module
        assert site.place is not None, "at the launch's place a crew is the launch's"
        mine = _copied_to_experts(module)
        with _without_values(site.model, site.layers):
            site.place.deal_experts(mine, site.building)
        for layer, old in zip(layers_with_experts(mine), before, strict=True):
            if layer.experts is not old.experts:
                self._finish(layer.experts, site, training)
        return mine

    def _finish(self, module: torch.nn.Module, site: BuildSite, training: bool) -> None:
        """Make a new module one of this place, on the device and in the type of the chunks."""
        if site.place is not None:
            site.place.settle(module)
        _mark_cut(module)
        for parameter in module.parameters():
            tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
        module.cuda(torch.cuda.current_device())
        if getattr(self.first, "bf16", False):
            module.bfloat16()
        elif getattr(self.first, "fp16", False):
            module.half()
        module.train(training)
        self.prepare(self.inner, module, site.place)

    def _layer(self, unit: int, site: BuildSite) -> torch.nn.Module:
        decoder, config = self.inner.decoder, _building_config(site.layers)
        offset = get_transformer_layer_offset(config, decoder.vp_stage, get_pg_rank(decoder.pg_collection.pp))
        layer = build_module(
            self.layer_specs.of_unit(unit),
            config=config_of_layer(config, unit),
            layer_number=unit - offset,
            pg_collection=site.building,
            vp_stage=decoder.vp_stage,
        )
        if layer.layer_number != unit:
            raise RuntimeError(f"Megatron gave layer {unit} the number {layer.layer_number}")
        if site.place is not None:
            site.place.deal_experts(layer, site.building)
        return layer  # type: ignore[no-any-return]

    def _embedding(self, site: BuildSite) -> torch.nn.Module:
        inner = self.inner
        embedding = LanguageModelEmbedding(
            config=site.model,
            vocab_size=site.vocabulary,
            max_sequence_length=inner.max_sequence_length,
            position_embedding_type=inner.position_embedding_type,
            tp_group=site.building.tp,
        )
        embedding.word_embeddings.weight.is_embedding_or_output_parameter = True
        for parameter in embedding.parameters():
            parameter.is_embedding_parameter = True
        return embedding  # type: ignore[no-any-return]

    def _head(self, site: BuildSite) -> Modules:
        prediction, output = self.layer_specs.prediction, self._output_layer(site)
        if prediction is None:
            return {"decoder.final_layernorm": self._final_norm(site), "output_layer": output}
        layers = build_prediction(prediction, _building_config(site.layers), site.building)
        if site.place is not None:
            site.place.deal_experts(layers, site.building)
        return {"embedding": self._embedding(site), "mtp": layers, "output_layer": output}

    def _final_norm(self, site: BuildSite) -> torch.nn.Module:
        norm = self.inner.decoder.submodules.layer_norm
        make = partial(build_module, norm) if isinstance(norm, ModuleSpec) else norm
        config = site.model
        return make(config=config, hidden_size=config.hidden_size, eps=config.layernorm_epsilon)  # type: ignore[no-any-return]

    def _output_layer(self, site: BuildSite) -> torch.nn.Module:
        config = site.model
        layer = tensor_parallel.ColumnParallelLinear(
            config.hidden_size,
            site.vocabulary,
            config=config,
            init_method=config.init_method,
            bias=False,
            skip_bias_add=False,
            gather_output=not self.inner.parallel_output,
            skip_weight_param_allocation=False,
            tp_group=site.building.tp,
        )
        layer.weight.is_embedding_or_output_parameter = True
        layer.weight.is_embedding_parameter = True
        return layer  # type: ignore[no-any-return]


def _building_config(config: Any) -> Any:
    """Return :func:`without_references`, and without a layout.

    With ``--pipeline-model-parallel-layout`` Megatron numbers layers by the process's present stage, which another
    thread may change while this one builds.
    """
    mine = without_references(config)
    mine.pipeline_model_parallel_layout = None
    return mine


def copy_with(original: Any, /, **children: torch.nn.Module | None) -> Any:
    """Return a shallow copy of ``original`` with its own child and parameter tables; ``children`` are replaced."""
    new = copy.copy(original)
    new._modules, new._parameters = dict(original._modules), dict(original._parameters)
    for name, child in children.items():
        new.__dict__.pop(name, None)
        if child is None:
            new._modules.pop(name, None)
            new.__dict__[name] = None
        else:
            new._modules[name] = child
    return new


def _copied_to_experts(module: torch.nn.Module) -> Any:
    """Return a copy of ``module`` with copies of what contains its routed layers, and of these; all else is shared."""
    children = {name: child for name, child in module.named_children() if layers_with_experts(child)}
    return copy_with(module, **{name: _copied_to_experts(child) for name, child in children.items()})


@contextmanager
def _without_values(*configs: Any) -> Iterator[None]:
    """Build modules without initial values inside the context."""
    before = [config.perform_initialization for config in configs]
    for config in configs:
        config.perform_initialization = False
    try:
        yield
    finally:
        for config, value in zip(configs, before, strict=True):
            config.perform_initialization = value


def _mark_cut(module: torch.nn.Module) -> None:
    """Mark the weights of Megatron's layers that are cut over tensor-parallel ranks.

    Megatron marks a weight only where it also gives it a value.
    """
    for part in module.modules():
        if isinstance(part, ColumnParallelLinear | RowParallelLinear | VocabParallelEmbedding):
            part.weight.tensor_model_parallel = True
            part.weight.partition_dim = 1 if isinstance(part, RowParallelLinear) else 0
