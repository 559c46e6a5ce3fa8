"""Megatron's GPTModel behind the engine's :class:`ModelInterface`.

Megatron builds the model for this rank's place at launch; the engine chooses the units
that it holds later (:meth:`GptInterface.hold`). Units: 0 the embedding, 1 … L the
transformer layers, L+1 final norm and head (if further tokens are predicted, L has the
final norm). If word embeddings are tied to the output layer, they form one further,
state-only unit L+2, held by every cell that holds either end.

Megatron's global values (docs/design.md §2.2) are set for the piece around each ``forward_step_func`` and restored
afterwards: ``args.micro_batch_size``, the present pipeline stage, and the number of stages, with one chunk a stage.
``args`` gets the stages too: a stage reads there which fields of a batch it needs.

In a cell of another tensor-parallel size than the launch's, parameters have local shapes. :class:`UnitParameter` then
names the parts of the launch's shards that they hold. In one that shares the sequence, a rank has its part of it
(:mod:`context_parallel`); Megatron's configuration keeps the context-parallel size of the launch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.utils import get_attr_wrapped_model, get_model_config

from megatron.elastic.engine.compute.model_interface import CellPlace, ForwardStep, LossOutput, UnitParameter
from megatron.elastic.engine.compute.sequence_cut import SequenceCut, is_sliced, length_of
from megatron.elastic.mcore.model.activations import held_bytes
from megatron.elastic.mcore.model.cell_limits import CellLimits
from megatron.elastic.mcore.model.context_parallel import ContextParallel, of_the_cell
from megatron.elastic.mcore.model.crew_dispatcher import GroupOf
from megatron.elastic.mcore.model.delayed_scales import largest_values, present_scales, set_past, set_scales
from megatron.elastic.mcore.model.dropout import key_module
from megatron.elastic.mcore.model.expert_homes import (
    forget_sent_tokens,
    is_expert,
    sent_tokens,
)
from megatron.elastic.mcore.model.layer_losses import LayerLosses
from megatron.elastic.mcore.model.layer_specs import LayerSpecs, routed_layers, sized_as_layer
from megatron.elastic.mcore.model.packed_sequences import mean_of_rows
from megatron.elastic.mcore.model.param_groups import GroupKeys
from megatron.elastic.mcore.model.prediction import predicts
from megatron.elastic.mcore.model.quantized_weights import kept_bytes, quantize_anew
from megatron.elastic.mcore.model.rank_places import CellGroups, RankPlaces
from megatron.elastic.mcore.model.router_bias import counted_tokens, forget_tokens, present_bias, set_bias
from megatron.elastic.mcore.model.split_backward import SplitLinears, WeightQueue
from megatron.elastic.mcore.model.split_te import split_te_linears
from megatron.elastic.mcore.model.tensor_cut import (
    LAYER_NAMES,
    Sizes,
    covered_shards,
)
from megatron.elastic.mcore.model.tensor_place import TensorPlace
from megatron.elastic.mcore.model.unit_parameters import TIED_NAME, UnitParameters
from megatron.elastic.mcore.model.units import Anatomy, unwrapped
from megatron.elastic.mcore.model.use_sites import own_use
from megatron.elastic.mcore.parallel_state.stage import (
    as_context_group,
    as_stage,
    as_tensor_group,
    whole_tensor_group,
)
from megatron.elastic.observe.summary import ranks_text
from megatron.elastic.plan.model import Piece
from megatron.elastic.plan.profile import PPM
from megatron.elastic.state.coverage import Overlap, Position
from megatron.elastic.state.delayed_scaling import TensorScale
from megatron.elastic.state.layout import ParamSpec

__all__ = ["GptInterface", "unwrapped"]

_CUTS = (
    *("pipeline_model_parallel_layout", "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"),
    *("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"),
)
"""Arguments that cut the launch's pipeline. They need not fit the stages of a piece, whose configuration a script may
make from the arguments."""


class GptInterface:
    """This rank's units of Megatron's GPT. ``chunks``: the result of Megatron's ``get_model`` (without DDP).

    ``tensor_group`` returns the tensor-parallel group of the ranks of a cell; without it this rank's layers are always
    those of the launch. ``crew_group`` returns the group of the ranks of a crew; without it layers with shared experts
    cannot compute. ``rank``: of the launch, whose place the chunks have; default: this process.
    """

    def __init__(
        self,
        chunks: Sequence[torch.nn.Module],
        args: Any,
        groups: GroupKeys,
        reads_data: bool,
        tensor_group: Callable[[tuple[int, ...]], dist.ProcessGroup] | None = None,
        layer_losses: LayerLosses | None = None,
        crew_group: GroupOf | None = None,
        context: ContextParallel | None = None,
        context_group: GroupOf | None = None,
        rank: int | None = None,
    ) -> None:
        self._chunks = torch.nn.ModuleList(chunks)
        self._args = args
        self._config = get_model_config(chunks[0])
        self._reads_data = reads_data
        self._packs = bool(getattr(args, "sft", False))
        self._layer_losses = layer_losses or LayerLosses()
        sizes = self._sizes = Sizes.of(self._config, unwrapped(chunks[0]).vocab_size, args.seq_length)
        self._limits = CellLimits(sizes, self._config, args, tensor_group is not None, context_group is not None)
        cell_groups = CellGroups(tensor_group, crew_group, context_group)
        self._places = RankPlaces(dist.get_rank() if rank is None else rank, sizes, self._config, cell_groups)
        self._context = context or ContextParallel()
        self._context.part = self._places.launch_part
        self._has_read = False
        """True once the script has read a batch here."""
        self._places.number_experts(self._chunks)
        self._linears = SplitLinears()
        self._anatomy = Anatomy(chunks, self._prepare, LayerSpecs.of([unwrapped(chunk) for chunk in chunks], args))
        self.compute_units = self._anatomy.units
        self._parameters = UnitParameters(self._anatomy, sizes, groups)
        self._units = self._parameters.held(None, self._places.experts_of(None))
        self._places.join_crew(self._chunks, None, None)
        self._split(self._chunks)
        if self._context.part is not None:
            self._anatomy.each(lambda inner, module: self._key(inner, module, None))
        self._contribute: Callable[[int, str, torch.Tensor], None] | None = None
        self._told: Callable[[int], None] | None = None

    @property
    def chunks(self) -> torch.nn.ModuleList:
        """The modules of Megatron's loop: the units of this rank's place at launch."""
        return self._chunks

    @property
    def tied_unit(self) -> int | None:
        """The state-only unit of tied embeddings, if the model ties them."""
        return self._parameters.tied_unit

    def _prepare(self, inner: Any, module: torch.nn.Module, place: TensorPlace | None) -> None:
        self._key(inner, module, place)
        self._split(module)

    def _key(self, inner: Any, module: torch.nn.Module, place: TensorPlace | None) -> None:
        """Have dropout draw the masks of this rank's place and part of the sequence."""
        key_module(inner, module, self._places.slices(place, self._context.part))

    def covered(self, unit: int, position: Position) -> tuple[int, ...]:
        """Return the shards of which a position computes a part (:class:`ModelInterface`)."""
        names: tuple[str, ...] = LAYER_NAMES
        if unit in (0, self.compute_units - 1, self.tied_unit):
            holds_weight = self.tied_unit is None or unit == self.tied_unit
            names = (TIED_NAME,) if holds_weight else ()
        return covered_shards(self._sizes, position, names)

    def overlaps(self, spec: ParamSpec, place: CellPlace) -> tuple[Overlap, ...] | None:
        """Return the overlaps of a parameter at a place (:class:`ModelInterface`)."""
        return self._parameters.overlaps(spec, self._places.of(place))

    def largest_part(self, tensor: int, parts: int, parameters: Collection[ParamSpec]) -> int | None:
        """Return the largest part of a layer on one rank (:class:`ModelInterface`)."""
        return self._limits.largest_part(tensor, parts, parameters)

    def refusal(self, tensor: int, parts: int, stages: int) -> str:
        """Return why no job has so many such cells while no rank is missing (:class:`ModelInterface`)."""
        return self._limits.refusal(tensor, parts, stages)

    def objection(self, parts: int) -> str:
        """Return why this process's script cannot compute a part of the sequence (:class:`ModelInterface`)."""
        if parts > 1 and self._packs:
            return "--sft: a row of packed sequences stays on one rank"
        if parts == 1 or self._context.cuts_batches or not self._has_read:
            return ""
        return "the script does not call get_batch_on_this_cp_rank, so each rank would have all of the sequence"

    def _split(self, module: torch.nn.Module) -> None:
        self._linears.install(module)
        split_te_linears(module, self._linears)

    def prepare(self, units: Collection[int], place: CellPlace | None = None) -> None:
        """Build modules ahead of :meth:`hold` (:class:`ModelInterface`)."""
        self._anatomy.prepare(units, self._places.of(place))

    def hold(self, units: Collection[int], place: CellPlace | None = None) -> None:
        """Hold exactly ``units`` (:class:`ModelInterface`).

        Raises ``ConfigError`` for a model that cannot be cut for that place; nothing changes then.
        """
        built_for = self._places.of(place)
        self._context.part = self._places.part_of(place)
        self._anatomy.hold([unit for unit in units if unit < self.compute_units], built_for)
        # Units that stay may have another part now, and those of the launch that come back may have had one.
        self._anatomy.each(lambda inner, module: self._key(inner, module, built_for))
        self._anatomy.each(lambda inner, module: self._places.join_crew(module, built_for, place))
        self._places.enter(built_for, place)
        self._units = self._parameters.held(built_for, self._places.experts_of(built_for))
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
        return self._reads_data if self._places.present is None else self._places.present.position.index == 0

    def takes_batch(self, piece: Piece) -> bool:
        """Return whether a piece takes a batch (:class:`ModelInterface`): each one if its rows are packed."""
        return self._packs or piece.first == 0 or piece.end == self.compute_units

    def train(self, mode: bool) -> None:
        """Switch between training and evaluation mode (:class:`ModelInterface`)."""
        self._anatomy.train(mode)

    def boundary(self, rows: int) -> tuple[torch.Size, torch.dtype]:
        """Return ``[s, rows, h]`` and its type; ``s`` positions are this rank's."""
        part, config = self._context.part, self._anatomy.config
        length = self._args.seq_length if part is None else length_of(part.runs)
        if config.sequence_parallel:
            length //= config.tensor_model_parallel_size
        dtype = torch.float32 if self._config.fp32_residual_connection else self._config.params_dtype
        return torch.Size((length, rows, self._config.hidden_size)), dtype

    def cut_sequence(self) -> SequenceCut | None:
        """Return how cells cut the sequence (:class:`ModelInterface`)."""
        return self._places.cut

    def whole_sequence_line(self, ranks: Sequence[int]) -> str:
        """Return the line that a cell of ``ranks`` computes without sequence parallelism; empty if it has that."""
        cut, count = self.cut_sequence(), len(ranks)
        if cut is None or cut.tensor is not None or count == 1 or is_sliced(count, cut.length):
            return ""
        named = ranks_text(ranks)
        return (
            f"sequence parallelism is off in tensor-parallel group {named}: {count} does not divide "
            f"{cut.length} positions"
        )

    def activation_bytes(self, unit: int) -> int:
        """Return the bytes a row that a unit's forward keeps (:class:`ModelInterface`)."""
        uneven = self._places.present is not None and not self._places.present.even
        vocabulary = self._places.present.vocabulary if self._places.present is not None else self._sizes.vocabulary
        config, last = self._anatomy.layer_config, self.compute_units - 1
        layer = 0 < unit < last
        routed = layer and routed_layers(self._config)[unit - 1]
        config = sized_as_layer(config, unit) if layer else config
        length, part = self._args.seq_length, self._places.launch_part
        own = length if part is None else part.longest
        return held_bytes(self._chunks, config, own, vocabulary, unit, last, routed, local=uneven, keys=length)

    def quantized_bytes(self, spec: ParamSpec) -> int:
        """Return the bytes of a parameter's copies in 8 bits (:class:`ModelInterface`)."""
        return kept_bytes(spec) if self._config.fp8 else 0

    def used_ppm(self, spec: ParamSpec) -> int:
        """Return the positions that a parameter multiplies (:class:`ModelInterface`): experts receive some of them.

        Those of a rank that shares experts receive positions of its whole crew. The output layer is used for each
        token that is predicted.
        """
        if not is_expert(spec.name):
            outputs = TIED_NAME if self._anatomy.output_tied else "output_layer.weight"
            return PPM * (1 + predicts(self._config)) if spec.name == outputs else PPM
        config, sizes = self._config, self._sizes
        ranks = sizes.expert_homes * sizes.expert_parts if sizes.experts else sizes.tensor
        return int(PPM * config.moe_router_topk * ranks // (config.num_moe_experts * sizes.tensor))

    def forward(
        self,
        step: ForwardStep,
        piece: Piece,
        place: tuple[int, int],
        source: torch.Tensor | None,
        batches: Iterator[Any],
    ) -> torch.Tensor | LossOutput:
        """Run a piece (:class:`ModelInterface`). Raises ``ValueError`` if the output has another number of rows."""
        if self._places.present is not None:
            self._places.present.require_group()
        with self._running(piece, place):
            segment = self._anatomy.segment(piece.first, piece.end)
            get_attr_wrapped_model(segment, "set_input_tensor")([source])
            with self._separate_output(unwrapped(segment), piece):
                output, loss_function = step(batches, segment)
            self._has_read |= piece.first == 0 or piece.end == self.compute_units
            if piece.end < self.compute_units:
                expected, kind = self.boundary(len(piece.rows))
                if (output.shape, output.dtype) != (expected, kind):
                    found = f"{tuple(output.shape)} in {output.dtype}"
                    raise ValueError(f"the model returned {found} for a boundary of {tuple(expected)} in {kind}")
                return output
            loss, part = _loss_output(loss_function(output)), self._context.part
            if self._packs and not torch.is_grad_enabled():
                loss = mean_of_rows(loss)
            return loss if part is None else of_the_cell(part, loss)

    def ghost(self, piece: Piece, place: tuple[int, int]) -> torch.Tensor:
        """Run the layers of a piece without rows (:class:`ModelInterface`): embedding and output exchange nothing."""
        if self._told is not None:
            for unit in range(piece.first, piece.end):
                self._told(unit)
        with self._running(piece, place):
            shape, dtype = self.boundary(0)
            source = torch.empty(shape, dtype=dtype, device=torch.cuda.current_device())
            decoder, *further = self._anatomy.ghost(piece.first, piece.end)
            decoder.set_input_tensor(source.requires_grad_(torch.is_grad_enabled()))
            output: torch.Tensor = decoder(hidden_states=None, attention_mask=None)
            for layers in further:
                output = layers(output)
            return output

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
            weight, lambda gradient: contribute(unit, TIED_NAME, gradient)
        )
        try:
            yield
        finally:
            del model.shared_embedding_or_output_weight

    @contextmanager
    def announcing(self, told: Callable[[int], None]) -> Iterator[None]:
        """Announce units (:class:`ModelInterface`). A ghost runs parts of layers: it announces all before it begins."""
        self._told = told
        try:
            with self._anatomy.announcing(told):
                yield
        finally:
            self._told = None

    def parameters_changed(self) -> None:
        """Let layers quantize their weights anew (:class:`ModelInterface`)."""
        if self._config.fp8:
            quantize_anew(self._anatomy.modules())

    def weigh_layer_losses(self, weight: float) -> None:
        """Weigh the losses that layers add, and forget values and counts (:class:`ModelInterface`)."""
        if self._config.num_moe_experts or predicts(self._config):
            device = torch.device(torch.cuda.current_device())
            self._layer_losses.weigh(weight, device, self._places.fewer_tokens)
            forget_tokens(self._anatomy.modules())
            forget_sent_tokens(self._anatomy.modules())

    def layer_losses(self) -> Mapping[str, tuple[float, float]]:
        """Return the losses that layers add (:class:`ModelInterface`)."""
        part, groups = self._context.part, list[dist.ProcessGroup]()
        if self._anatomy.config.tensor_model_parallel_size > 1:
            groups.append(self._places.tensor_group)
        if part is not None and part.group is not None:
            groups.append(part.group)
        return self._layer_losses.take(groups)

    def set_expert_bias(self, bias: Mapping[int, Sequence[float]]) -> None:
        """Set the bias of routers (:class:`ModelInterface`), also in the modules of the launch, for checkpoints."""
        if bias:
            set_bias((*self._anatomy.modules(), self._chunks), bias)

    def expert_tokens(self) -> Mapping[int, Sequence[int]]:
        """Return the tokens of experts (:class:`ModelInterface`)."""
        return counted_tokens(self._anatomy.modules()) or sent_tokens(self._anatomy.modules())

    def launched_bias(self) -> dict[int, tuple[float, ...]]:
        """Return unit → bias of its router, of the modules of the launch: as loaded from a checkpoint."""
        return present_bias((self._chunks,))

    def set_scales(self, scales: Mapping[int, Sequence[float]]) -> None:
        """Set the scales of tensors in FP8 (:class:`ModelInterface`)."""
        set_scales(self._anatomy.modules(), self._config, scales)

    def amaxes(self) -> Mapping[int, Sequence[float]]:
        """Return the largest values of tensors in FP8 (:class:`ModelInterface`)."""
        return largest_values(self._anatomy.modules(), self._config)

    def keep_scales(self, tensors: Mapping[int, Sequence[TensorScale]]) -> None:
        """Put scales and histories into the modules of the launch, for a checkpoint; empty: there are none."""
        if tensors:
            set_past((self._chunks,), self._config, tensors)

    def launched_scales(self, window: int) -> dict[int, tuple[TensorScale, ...]]:
        """Return unit → its tensors in FP8, of the modules of the launch: as loaded from a checkpoint."""
        return present_scales((self._chunks,), window)

    def finish_gradients(self, grads: Mapping[int, Sequence[torch.Tensor]]) -> None:
        """Sum (or average) partial gradients over the tensor-parallel group."""
        group = self._places.tensor_group
        size = self._anatomy.config.tensor_model_parallel_size
        if size == 1:
            return
        summed: list[torch.Tensor] = []
        averaged: list[torch.Tensor] = []
        for unit, views in grads.items():
            for item, view in zip(self._units[unit], views, strict=True):
                if getattr(item.parameter, "average_gradients_across_tp_domain", False):
                    averaged.append(view)
                elif self._partial(item):
                    summed.append(view)
        for tensors, divisor in ((summed, 1), (averaged, size)):
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
            (self._anatomy.config.sequence_parallel and getattr(item.parameter, "sequence_parallel", False))
            or normalises_qk
        )

    @contextmanager
    def _running(self, piece: Piece, place: tuple[int, int]) -> Iterator[None]:
        """Set Megatron's global stage and micro-batch size to those of one piece, inside the context."""
        running = {
            "micro_batch_size": len(piece.rows),
            "pipeline_model_parallel_size": place[1],
            "virtual_pipeline_model_parallel_size": None,
            **dict.fromkeys((name for name in _CUTS if getattr(self._args, name, None)), None),
        }
        before = {name: getattr(self._args, name) for name in running}
        vars(self._args).update(running)
        group = as_tensor_group(self._places.present.group) if self._places.present is not None else nullcontext()
        part = self._context.part
        shared = as_context_group(part.group) if part is not None and part.group is not None else nullcontext()
        try:
            with as_stage(*place), group, shared:
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
