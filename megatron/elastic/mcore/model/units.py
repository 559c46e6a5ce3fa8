"""The units of Megatron's GPTModel: separation, construction of missing units, and assembly of unit ranges.

The chunks that Megatron built (one, or with an interleaved schedule several) are not
changed. A unit that this process gains is one more module, built from the specification
of that layer. A *segment* is a shallow copy of a chunk that shares those modules but
lists only the units that it runs, as the only chunk of its stage. Copies have lists of
their own, so pieces of different segments may be between forward and backward at the
same time, also when activations are recomputed in backward.

Invariant: parameters have Megatron's names, tensor-parallel attributes and types, whether Megatron or this module
built them. A unit that is no longer held frees its memory. The modules of the launch stay, but empty, since Megatron's
loop refers to them.

A rank may take another place, in a tensor-parallel group of any size. All its units are then built anew, with the
local sizes of that place (:mod:`tensor_place`).
"""

from __future__ import annotations

import copy
import threading
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel

from megatron.elastic.config import ConfigError
from megatron.elastic.engine.compute.model_interface import place_of
from megatron.elastic.mcore.model.ghost import GhostLayer, GhostPrediction
from megatron.elastic.mcore.model.layer_specs import LayerSpecs
from megatron.elastic.mcore.model.prediction import final_norm_unit
from megatron.elastic.mcore.model.tensor_place import TensorPlace
from megatron.elastic.mcore.model.unit_builder import BuildSite, Modules, UnitBuilder, copy_with
from megatron.elastic.mcore.model.vocabulary_range import vocabulary_range
from megatron.elastic.mcore.parallel_state.stage import GroupStandIn

__all__ = ["Anatomy", "refuse_frozen", "refuse_others", "unwrapped"]


class Anatomy:
    """The units of one process; ``prepare`` is told of every module that is built, and for which place."""

    def __init__(
        self,
        chunks: Sequence[torch.nn.Module],
        prepare: Callable[[Any, torch.nn.Module, TensorPlace | None], object],
        layer_specs: LayerSpecs,
    ) -> None:
        self._chunks = torch.nn.ModuleList(chunks)
        self._first = chunks[0]
        """The first chunk; configuration, layer specification, groups and wrappers are equal in all chunks."""
        self._inner = unwrapped(self._first)
        self.units = int(self._inner.config.num_layers) + 2
        self._predicts = layer_specs.prediction is not None
        self._builder = UnitBuilder(self._first, self._inner, self.units, layer_specs, prepare)
        self._born: dict[int, Modules] = {}
        for chunk in chunks:
            self._born |= _units_of(unwrapped(chunk), self.units)
        self._held: dict[int, Modules] = dict(self._born)
        self._ready: dict[int, Modules] = {}
        """Layers built ahead of :meth:`hold`, for ``_ready_for``."""
        self._ready_for: TensorPlace | None = None
        self._building = threading.Lock()
        self._shapes = [(parameter, parameter.shape) for parameter in self._chunks.parameters()]
        self._segments: dict[tuple[int, int], torch.nn.Module] = {}
        self._ghosts: dict[tuple[int, int], torch.nn.ModuleList] = {}
        self._training = True
        self._site = BuildSite.of(self._inner, None)

    @property
    def tied(self) -> bool:
        """True if both ends of the model use the word embeddings' weight."""
        return self.output_tied or self._predicts

    @property
    def output_tied(self) -> bool:
        """True if the output layer uses the word embeddings' weight."""
        return bool(getattr(self._inner, "share_embeddings_and_output_weights", False))

    @property
    def config(self) -> Any:
        """The model's configuration, with the size of this rank's cell."""
        return self._site.model

    @property
    def layer_config(self) -> Any:
        """The configuration of this rank's layers; its sizes are local where the cell deals them unevenly."""
        return self._site.layers

    def held(self) -> tuple[int, ...]:
        """Return the held compute units, ascending."""
        return tuple(sorted(self._held))

    def modules(self) -> tuple[torch.nn.Module, ...]:
        """Return the modules of the held units."""
        return tuple(module for modules in self._held.values() for module in modules.values())

    def named_parameters(self, unit: int) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Yield the trainable parameters of a held unit with Megatron's names (layers counted over the whole model).

        A tied weight is not among them (:meth:`tied_parameter`).
        """
        tied = (*((_EMBEDDED,) if self.tied else ()), *((_OUTPUT,) if self.output_tied else ()))
        for path, module in self._held[unit].items():
            for name, parameter in module.named_parameters():
                whole = f"{path}.{name}"
                if parameter.requires_grad and whole not in tied:
                    yield whole, parameter

    @contextmanager
    def announcing(self, told: Callable[[int], None]) -> Iterator[None]:
        """Call ``told(unit)`` before a module of a held unit runs, inside the context."""
        handles = [
            module.register_forward_pre_hook(lambda *_, unit=unit: told(unit))
            for unit, modules in self._held.items()
            for module in modules.values()
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def tied_parameter(self) -> torch.nn.Parameter | None:
        """Return the weight that both ends share; ``None`` if neither is held."""
        embedding = self._looks_up()
        if embedding is not None:
            return embedding.word_embeddings.weight  # type: ignore[no-any-return]
        if self.units - 1 in self._held:
            return self._held[self.units - 1]["output_layer"].weight  # type: ignore[no-any-return]
        return None

    def _looks_up(self) -> Any:
        """Return the embedding that this rank computes with: that of the first unit, else the head's own, if any."""
        return self._held.get(0, self._held.get(self.units - 1, {})).get("embedding")

    def prepare(self, units: Collection[int], place: TensorPlace | None = None) -> None:
        """Build missing layers ahead of :meth:`hold`; on any thread, while other layers run.

        The ends of the model are not built ahead: only the training thread may restore the random state they use.
        """
        for unit in sorted(units):
            with self._building:
                if self._ready_for != place:
                    self._ready, self._ready_for = {}, place
                if 0 < unit < self.units - 1 and unit not in self._known(place):
                    self._ready[unit] = self._builder.build(unit, self._site_of(place), self._training)

    def hold(self, units: Collection[int], place: TensorPlace | None = None) -> None:
        """Build missing ones of ``units`` and free all others. Values of new parameters are undefined.

        ``place``: this rank's place in its cell (None: that of the launch). When it changes, every unit is missing; of
        units that only have experts of another crew, these alone are.
        """
        self._segments.clear()
        self._ghosts.clear()
        wanted = frozenset(units)
        with self._building, torch.random.fork_rng(devices=[]):
            site = self._site_of(place)
            known, others = self._known(place), self._with_other_experts(place)
            held = dict[int, Modules]()
            for unit in sorted(wanted):
                if unit in known and not self._headless(known[unit], wanted):
                    held[unit] = known[unit]
                elif unit in others and not self._headless(others[unit], wanted):
                    held[unit] = self._builder.with_experts(unit, others[unit], site, self._training)
                else:
                    held[unit] = self._builder.build(unit, site, self._training)
            self._held, self._site, self._ready = held, site, {}
        for modules in self._held.values():
            for module in modules.values():
                module.train(self._training)
        alive = {id(parameter) for unit in self._held for _, parameter in self.named_parameters(unit)}
        alive.add(id(self.tied_parameter()))
        for modules in (*self._born.values(), *self._held.values()):
            for module in modules.values():
                for parameter in module.parameters():
                    if parameter.requires_grad and id(parameter) not in alive:
                        parameter.data, parameter.grad = parameter.data.new_empty(0), None

    def each(self, change: Callable[[Any, torch.nn.Module], None]) -> None:
        """Call ``change`` with the model and each module that is held."""
        for modules in self._held.values():
            for module in modules.values():
                change(self._inner, module)

    def _known(self, place: TensorPlace | None) -> dict[int, Modules]:
        """Return the units that need not be built for ``place``."""
        return {
            **(self._ready if place == self._ready_for else {}),
            **(self._born if place is None else {}),
            **(self._held if place == self._site.place else {}),
        }

    def _with_other_experts(self, place: TensorPlace | None) -> dict[int, Modules]:
        """Return the held units that are as ``place`` needs them but for their experts."""
        before = self._site.place
        same_cell = place is not None and place.launched and (before is None or before.launched)
        return self._held if same_cell else {}

    def _site_of(self, place: TensorPlace | None) -> BuildSite:
        if place == self._site.place:
            return self._site
        # Modules are built in a group of one, then settled: Megatron's remark does not hold afterwards.
        warnings.filterwarnings("ignore", message="`sequence_parallel` is set to `True`")
        return BuildSite.of(self._inner, place)

    def _headless(self, modules: Modules, wanted: frozenset[int]) -> bool:
        """Return whether the unit is a head that was built beside the embedding, whose weight it now lacks."""
        head = modules.get("output_layer")
        if head is None or 0 in wanted:
            return False
        return head.weight is None or ("mtp" in modules and "embedding" not in modules)

    @contextmanager
    def as_launched(self) -> Iterator[None]:
        """Give every parameter of the chunks its shape inside the context (values undefined if it is not held)."""
        empty = [
            (parameter, shape) for parameter, shape in self._shapes if parameter.numel() == 0 and shape.numel() > 0
        ]
        for parameter, shape in empty:
            parameter.data = parameter.data.new_empty(shape)
        try:
            yield
        finally:
            for parameter, _ in empty:
                parameter.data = parameter.data.new_empty(0)

    def train(self, mode: bool) -> None:
        """Switch all modules between training and evaluation mode."""
        self._training = mode
        self._chunks.train(mode)
        for segment in (*self._segments.values(), *self._ghosts.values()):
            segment.train(mode)

    def segment(self, first: int, end: int) -> torch.nn.Module:
        """Return the model of units ``[first, end)``. Raises ``KeyError`` if one is missing."""
        if (first, end) not in self._segments:
            segment = self._assembled(first, end)
            segment.train(self._training)
            self._segments[first, end] = segment
        return self._segments[first, end]

    def ghost(self, first: int, end: int) -> Sequence[Any]:
        """Return the decoder of units ``[first, end)`` for no rows, and the further tokens' layers if it has them.

        Raises ``KeyError`` if a unit is missing.
        """
        if (first, end) not in self._ghosts:
            model = unwrapped(self.segment(first, end))
            ghosts = torch.nn.ModuleList(GhostLayer(layer) for layer in model.decoder.layers)
            decoder = copy_with(model.decoder, layers=ghosts, final_layernorm=None)
            decoder.pre_process = decoder.post_process = False
            further = [GhostPrediction(model.mtp)] if model.mtp_process else []
            self._ghosts[first, end] = torch.nn.ModuleList([decoder, *further]).train(self._training)
        return list(self._ghosts[first, end])

    # -- assembling ----------------------------------------------------------------

    def _assembled(self, first: int, end: int) -> torch.nn.Module:
        starts, ends = first == 0, end == self.units
        parts = {path: module for unit in range(first, end) for path, module in self._held[unit].items()}
        layers = [module for path, module in parts.items() if path.startswith("decoder.layers.")]
        decoder = copy_with(
            self._inner.decoder,
            layers=torch.nn.ModuleList(layers),
            final_layernorm=parts.get("decoder.final_layernorm"),
        )
        decoder.pre_process, decoder.post_process, decoder.input_tensor = starts, ends, None
        decoder.num_layers_per_pipeline_rank = len(layers)
        self._join(decoder)
        output = parts.get("output_layer")
        if output is not None and self.output_tied:
            output = copy_with(output)
            vars(output).pop("weight", None)  # None in a head that Megatron built beside the embedding
            output._parameters["weight"] = self.tied_parameter()
        prediction = parts.get("mtp")
        embedding = self._looks_up() if starts or prediction is not None else None
        model = copy_with(self._inner, embedding=embedding, decoder=decoder, output_layer=output, mtp=prediction)
        model.pre_process, model.post_process, model.mtp_process = starts, ends, prediction is not None
        model.vp_stage = model.vp_size = None
        for attribute in ("embedding_activation_buffer", "grad_output_buffer"):
            if not hasattr(model, attribute):
                setattr(model, attribute, None)
        self._join(model)
        place = self._site.place
        if place is not None and not place.even:
            model.compute_language_model_loss = _loss_of(model, place)
        return self._wrapped(model, first, end)

    def _join(self, module: Any) -> None:
        """Give the copy of a model, decoder or wrapper the configuration and groups of this rank's cell."""
        if self._site.place is not None:
            mine = {
                "config": self._site.model,
                "pg_collection": self._site.groups,
                "tp_group": self._site.place.group,
            }
            for name in mine.keys() & vars(module).keys():
                setattr(module, name, mine[name])

    def _wrapped(self, model: Any, first: int, end: int) -> torch.nn.Module:
        """Wrap units ``[first, end)`` like Megatron's own chunks (a wrapper converts to 16 bits at the ends).

        The wrapper receives their place, since it would otherwise use the pipeline group, which may have lost members.
        """
        wrappers, at = [], self._first
        while hasattr(at, "module"):
            wrappers.append(at)
            at = at.module  # type: ignore[assignment]
        for wrapper in reversed(wrappers):
            model = copy_with(wrapper, module=model)
            model.vp_stage = model.vp_size = None
            self._join(model)
            if getattr(model, "pg_collection", None) is not None:
                model.pg_collection = copy.copy(model.pg_collection)
                model.pg_collection.pp = GroupStandIn(*place_of(first, end, self.units))
        return model  # type: ignore[no-any-return]


def _loss_of(model: Any, place: TensorPlace) -> Callable[..., torch.Tensor]:
    """Return the model's loss, computed with this position's rows of the vocabulary."""
    original = model.compute_language_model_loss

    def loss(*args: Any, **kwargs: Any) -> torch.Tensor:
        with vocabulary_range(*place.share.vocabulary):
            return original(*args, **kwargs)  # type: ignore[no-any-return]

    return loss


_EMBEDDED, _OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"
"""Names of the weights that may be one."""


def refuse_others(chunks: Sequence[torch.nn.Module]) -> None:
    """Raise ``ConfigError`` for a model that is not Megatron's GPT, whose units are the only known ones."""
    model = unwrapped(chunks[0])
    if not isinstance(model, GPTModel):
        raise ConfigError(
            "--elastic cuts a model into embedding, layers and head, and knows these of Megatron's GPTModel only; this "
            f"script builds {type(model).__name__}: leave out --elastic"
        )


def refuse_frozen(chunks: Sequence[torch.nn.Module]) -> None:
    """Raise ``ConfigError`` for a model with parameters that are not trained.

    They are no part of the state that is copied: a rank that joins, or takes layers over, would compute with other
    values of them.
    """
    names = [name for chunk in chunks for name, parameter in chunk.named_parameters() if not parameter.requires_grad]
    if names:
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        raise ConfigError(
            f"--elastic moves trained parameters only, and {names[0]}{more} has requires_grad=False: train it "
            "(a learning rate of 0 keeps its value), or leave out --elastic"
        )


def unwrapped(module: torch.nn.Module) -> Any:
    """Return the GPTModel inside wrappers such as ``Float16Module``."""
    inner: Any = module
    while hasattr(inner, "module"):
        inner = inner.module
    return inner


def _units_of(model: Any, count: int) -> dict[int, Modules]:
    """Return the modules of the units that Megatron built in this process."""
    units: dict[int, Modules] = {}
    if model.pre_process:
        units[0] = {"embedding": model.embedding}
    for layer in model.decoder.layers:
        number = int(layer.layer_number)
        units[number] = {f"decoder.layers.{number - 1}": layer}
    norm = model.decoder.final_layernorm
    if norm is not None:  # in a chunk with the last layer, or with the head
        units.setdefault(final_norm_unit(model.config, count), {})["decoder.final_layernorm"] = norm
    if model.post_process:
        head = units.setdefault(count - 1, {})
        if getattr(model, "mtp_process", False):
            if not model.pre_process:
                head["embedding"] = model.embedding
                model.embedding.word_embeddings.weight.is_embedding_or_output_parameter = True  # as that of unit 0
            head["mtp"] = model.mtp
        head["output_layer"] = model.output_layer
    return units
