"""Megatron's GPTModel behind the engine's :class:`ModelInterface`.

Megatron builds the model for this rank's place at launch; the engine chooses the units
that it holds later (:meth:`GptInterface.hold`). Units: 0 the embedding, 1 … L the
transformer layers, L+1 final norm and head. If word embeddings are tied to the output
layer, they form one further, state-only unit L+2, held by every cell that holds
either end.

Megatron's global values (docs/design.md §2.2) are set for the piece around each ``forward_step_func`` and restored
afterwards: ``args.micro_batch_size``, the present pipeline stage, and the number of stages, with one chunk a stage.
``args`` gets the stages too: a stage reads there which fields of a batch it needs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.utils import get_attr_wrapped_model, get_model_config

from megatron.elastic.engine.compute.model_interface import CellPlace, ForwardStep, LossOutput, UnitParameter
from megatron.elastic.mcore.model.activations import held_bytes
from megatron.elastic.mcore.model.dropout import key_module
from megatron.elastic.mcore.model.param_groups import GroupKeys
from megatron.elastic.mcore.model.split_backward import SplitLinears, WeightQueue
from megatron.elastic.mcore.model.split_te import split_te_linears
from megatron.elastic.mcore.model.units import Anatomy, unwrapped
from megatron.elastic.mcore.model.use_sites import own_use
from megatron.elastic.mcore.parallel_state.stage import as_stage, whole_tensor_group
from megatron.elastic.plan.model import Piece
from megatron.elastic.state.coverage import Position
from megatron.elastic.state.layout import ParamSpec

__all__ = ["GptInterface", "unwrapped"]

_TIED_NAME = "word_embeddings.weight"


class GptInterface:
    """This rank's units of Megatron's GPT. ``chunks``: the result of Megatron's ``get_model`` (without DDP)."""

    def __init__(self, chunks: Sequence[torch.nn.Module], args: Any, groups: GroupKeys, reads_data: bool) -> None:
        self._chunks = torch.nn.ModuleList(chunks)
        self._args = args
        self._config = get_model_config(chunks[0])
        self._groups = groups
        self._reads_data = reads_data
        self._tensor_rank = parallel_state.get_tensor_model_parallel_rank()
        self._linears = SplitLinears()
        self._anatomy = Anatomy(chunks, self._prepare)
        self.compute_units = self._anatomy.units
        self._specs: dict[int, tuple[ParamSpec, ...]] = {}
        self._units = self._sort_parameters()
        self._split(self._chunks)
        self._contribute: Callable[[int, str, torch.Tensor], None] | None = None

    @property
    def chunks(self) -> torch.nn.ModuleList:
        """The modules of Megatron's loop: the units of this rank's place at launch."""
        return self._chunks

    @property
    def tied_unit(self) -> int | None:
        """The state-only unit of tied embeddings, if the model ties them."""
        return self.compute_units if self._anatomy.tied else None

    def _prepare(self, inner: Any, module: torch.nn.Module) -> None:
        key_module(inner, module, self._tensor_rank)
        self._split(module)

    def _split(self, module: torch.nn.Module) -> None:
        self._linears.install(module)
        split_te_linears(module, self._linears)

    def prepare(self, units: Collection[int], place: CellPlace | None = None) -> None:
        """Build modules ahead of :meth:`hold` (:class:`ModelInterface`)."""
        self._require_launched(place)
        self._anatomy.prepare(units)

    def covered(self, unit: int, position: Position) -> tuple[int, ...]:
        """Raise ``ValueError``: layers of another tensor-parallel size are not built (:class:`ModelInterface`)."""
        raise ValueError(f"unit {unit}: Megatron's layers are built for the launch's tensor-parallel size only")

    def _require_launched(self, place: CellPlace | None) -> None:
        launched = Position(self._tensor_rank, self._config.tensor_model_parallel_size)
        if place is not None and place.position != launched:
            raise ValueError(f"this rank's layers are those of {launched}, not of {place.position}")

    def hold(self, units: Collection[int], place: CellPlace | None = None) -> None:
        """Hold exactly ``units`` (:class:`ModelInterface`)."""
        self._require_launched(place)
        self._anatomy.hold([unit for unit in units if unit < self.compute_units])
        self._units = self._sort_parameters()
        if self.held_units() != tuple(sorted(units)):
            raise ValueError(f"units {sorted(units)} cannot be held together: these are {self.held_units()}")

    @contextmanager
    def as_launched(self) -> Iterator[None]:
        """Give :attr:`chunks` parameters of Megatron's shapes inside the context, for checkpoints.

        This includes units that this rank no longer holds, and groups that are not whole.
        """
        with self._anatomy.as_launched(), whole_tensor_group(self._chunks):
            yield

    def held_units(self) -> tuple[int, ...]:
        """Return the held units (:class:`ModelInterface`)."""
        return tuple(sorted(self._units))

    def unit_parameters(self, unit: int) -> Sequence[UnitParameter]:
        """Return the parameters of a held unit (:class:`ModelInterface`)."""
        return self._units[unit]

    def reads_data(self) -> bool:
        """Return whether this rank reads the data set (:class:`ModelInterface`)."""
        return self._reads_data

    def train(self, mode: bool) -> None:
        """Switch between training and evaluation mode (:class:`ModelInterface`)."""
        self._anatomy.train(mode)

    def boundary(self, rows: int) -> tuple[torch.Size, torch.dtype]:
        """Return ``[s, rows, h]`` and its type; under sequence parallelism ``s`` is this rank's slice."""
        length = self._args.seq_length
        if self._config.sequence_parallel:
            length //= self._config.tensor_model_parallel_size
        dtype = torch.float32 if self._config.fp32_residual_connection else self._config.params_dtype
        return torch.Size((length, rows, self._config.hidden_size)), dtype

    def activation_bytes(self, unit: int) -> int:
        """Return the bytes a row that a unit's forward keeps (:class:`ModelInterface`)."""
        vocabulary = unwrapped(self._chunks[0]).vocab_size
        return held_bytes(self._chunks, self._config, self._args.seq_length, vocabulary, unit, self.compute_units - 1)

    def forward(
        self,
        step: ForwardStep,
        piece: Piece,
        place: tuple[int, int],
        source: torch.Tensor | None,
        batches: Iterator[Any],
    ) -> torch.Tensor | LossOutput:
        """Run a piece (:class:`ModelInterface`). Raises ``ValueError`` if the output has another number of rows."""
        with self._running(piece, place):
            segment = self._anatomy.segment(piece.first, piece.end)
            get_attr_wrapped_model(segment, "set_input_tensor")([source])
            with self._separate_output(unwrapped(segment), piece):
                output, loss_function = step(batches, segment)
            if piece.end < self.compute_units:
                expected, _ = self.boundary(len(piece.rows))
                if output.shape != expected:
                    raise ValueError(f"the model returned {tuple(output.shape)} for a boundary of {tuple(expected)}")
                return output
            return _loss_output(loss_function(output))

    def deferring(self, piece: Piece) -> AbstractContextManager[WeightQueue]:
        """Defer weight gradients (:class:`ModelInterface`), except tied embeddings if a piece passes both ends."""
        both_ends = self.tied_unit is not None and (piece.first, piece.end) == (0, self.compute_units)
        tied = [item.parameter for item in self._units[self.compute_units]] if both_ends else []
        return self._linears.deferring(tied)

    def separate_uses(self, contribute: Callable[[int, str, torch.Tensor], None]) -> None:
        """Separate the output layer's use of tied embeddings (:class:`ModelInterface`)."""
        self._contribute = contribute

    @contextmanager
    def _separate_output(self, model: Any, piece: Piece) -> Iterator[None]:
        """Separate the output layer's use of tied embeddings during a piece's forward."""
        contribute, unit = self._contribute, self.tied_unit
        if contribute is None or unit is None or piece.end < self.compute_units:
            yield
            return
        weight = self._anatomy.tied_parameter()
        assert weight is not None
        model.shared_embedding_or_output_weight = lambda: own_use(
            weight, lambda gradient: contribute(unit, _TIED_NAME, gradient)
        )
        try:
            yield
        finally:
            del model.shared_embedding_or_output_weight

    def finish_gradients(self, grads: Mapping[int, Sequence[torch.Tensor]]) -> None:
        """Sum (or average) partial gradients over the tensor-parallel group."""
        group = parallel_state.get_tensor_model_parallel_group()
        if self._config.tensor_model_parallel_size == 1:
            return
        summed: list[torch.Tensor] = []
        averaged: list[torch.Tensor] = []
        for unit, views in grads.items():
            for item, view in zip(self._units[unit], views, strict=True):
                if getattr(item.parameter, "average_gradients_across_tp_domain", False):
                    averaged.append(view)
                elif self._partial(item):
                    summed.append(view)
        for tensors, divisor in ((summed, 1), (averaged, self._config.tensor_model_parallel_size)):
            if tensors:
                flat = torch.cat([t.reshape(-1) for t in tensors])
                dist.all_reduce(flat, group=group)
                if divisor > 1:
                    flat = torch.div(flat, divisor, rounding_mode=None if flat.is_floating_point() else "floor")
                for view, part in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
                    view.copy_(part.view(view.shape))

    def _partial(self, item: UnitParameter) -> bool:
        normalises_qk = self._config.qk_layernorm and any(
            name in item.spec.name for name in ("q_layernorm", "k_layernorm")
        )
        return bool(
            (self._config.sequence_parallel and getattr(item.parameter, "sequence_parallel", False)) or normalises_qk
        )

    def _sort_parameters(self) -> dict[int, tuple[UnitParameter, ...]]:
        """Return the parameters of held units; a unit's specification is fixed when it is first held."""
        units: dict[int, list[tuple[str, torch.nn.Parameter]]] = {
            unit: list(self._anatomy.named_parameters(unit)) for unit in self._anatomy.held()
        }
        shared = self._anatomy.tied_parameter() if self.tied_unit is not None else None
        if shared is not None and self.tied_unit is not None:
            units[self.tied_unit] = [("embedding.word_embeddings.weight", shared)]
        found: dict[int, tuple[UnitParameter, ...]] = {}
        for unit, named in units.items():
            if unit not in self._specs:
                self._specs[unit] = tuple(self._spec(unit, name, parameter) for name, parameter in named)
            found[unit] = tuple(
                UnitParameter(spec, parameter) for spec, (_, parameter) in zip(self._specs[unit], named, strict=True)
            )
        return found

    def _spec(self, unit: int, name: str, parameter: torch.nn.Parameter) -> ParamSpec:
        key = self._groups.key(name, parameter)
        return ParamSpec(
            name=self._local_name(unit, name),
            numel=parameter.numel(),
            shape=tuple(parameter.shape),
            sharded=bool(getattr(parameter, "tensor_model_parallel", False)),
            weight_decay_multiplier=key.wd_mult,
            group=key.index,
        )

    def _local_name(self, unit: int, name: str) -> str:
        """Return a parameter's name within its unit, equal on every holder."""
        if unit == self.tied_unit:
            return _TIED_NAME
        return name.removeprefix(f"decoder.layers.{unit - 1}.") if 0 < unit < self.compute_units - 1 else name

    @contextmanager
    def _running(self, piece: Piece, place: tuple[int, int]) -> Iterator[None]:
        """Set Megatron's global stage and micro-batch size to those of one piece, inside the context."""
        running = {
            "micro_batch_size": len(piece.rows),
            "pipeline_model_parallel_size": place[1],
            "virtual_pipeline_model_parallel_size": None,
        }
        before = {name: getattr(self._args, name) for name in running}
        vars(self._args).update(running)
        try:
            with as_stage(*place):
                yield
        finally:
            vars(self._args).update(before)


def _loss_output(result: Any) -> LossOutput:
    """Return the loss output of Megatron's two conventions: (loss, report), a mean, or (sum, tokens, report)."""
    if len(result) == 3:
        return LossOutput(result[0], result[1], result[2])
    if len(result) == 2:
        return LossOutput(result[0], None, result[1])
    raise ValueError("the loss function must return (mean loss, report) or (loss sum, number of tokens, report)")
