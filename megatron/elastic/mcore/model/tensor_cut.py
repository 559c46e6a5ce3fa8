"""The cut of a GPT over n tensor-parallel ranks, for any n, and how it covers the launch's even cut over T ranks.

A share is the part of each tensor axis that one position computes:

- *Attention.* With at least n query groups, whole groups are dealt as evenly as possible; the first positions get one
  more. With fewer, the positions are dealt over the groups, and the heads of a group over its positions. Each of these
  computes the group's key and value, so their gradient is the sum over these positions.
- *Columns of the MLP, of a shared expert and of an expert, and rows of the vocabulary* are dealt as evenly as possible.
  Where ranks share experts (expert parallelism), an expert's columns have a cut of their own (:func:`expert_overlaps`).
- *Sequence parallelism* is on only where n is above one and divides the sequence; otherwise it is off for the cell.

With n = T the share is Megatron's own. Its fused query, key and value rows are then cut evenly, also inside a group.
Each axis below is one dimension of the whole parameter; a share of it is a list of intervals (runs).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple, TypeVar

from megatron.elastic.engine.compute.sequence_cut import is_sliced
from megatron.elastic.state.coverage import Overlap, Position, common_shard

__all__ = [
    "LAYER_NAMES",
    "Sizes",
    "TensorShare",
    "covered_shards",
    "deal",
    "expert_overlaps",
    "expert_shape",
    "is_cut",
    "launch_shape",
    "local_shape",
    "overlaps_of",
    "refusal",
    "share_of",
]

T = TypeVar("T")

Run = tuple[int, int]
"""``[start, stop)``, in elements of a dimension of the whole parameter."""


class _Axis(NamedTuple):
    """The dimension of a whole parameter that is cut."""

    kind: str
    gated: bool = False
    """True if the parameter is [gate; up] where MLPs are gated."""


_QKV, _HEADS, _VOCABULARY = _Axis("qkv"), _Axis("heads"), _Axis("vocabulary")
_HEAD_NUMBERS = _Axis("numbers, one for each head")
_MLP, _SHARED, _EXPERT = "MLP columns", "columns of shared experts", "columns of an expert"

LAYER_NAMES = (
    "self_attention.linear_qkv.weight",
    "self_attention.linear_proj.weight",
    "self_attention.core_attention.softmax_offset",
    "mlp.linear_fc1.weight",
    "mlp.linear_fc2.weight",
    "shared_experts.linear_fc1.weight",
    "shared_experts.linear_fc2.weight",
    "local_experts.linear_fc1.weight",
    "local_experts.linear_fc2.weight",
)
"""Cut parameters that a layer may have, one for each axis."""

_CUTS: dict[str, tuple[_Axis, int]] = {
    "self_attention.linear_qkv.weight": (_QKV, 0),
    "self_attention.linear_qkv.bias": (_QKV, 0),
    "self_attention.linear_proj.weight": (_HEADS, 1),
    "self_attention.core_attention.softmax_offset": (_HEAD_NUMBERS, 0),
    "mlp.linear_fc1.weight": (_Axis(_MLP, gated=True), 0),
    "mlp.linear_fc1.bias": (_Axis(_MLP, gated=True), 0),
    "mlp.linear_fc2.weight": (_Axis(_MLP), 1),
    "shared_experts.linear_fc1.weight": (_Axis(_SHARED, gated=True), 0),
    "shared_experts.linear_fc2.weight": (_Axis(_SHARED), 1),
    "local_experts.linear_fc1.weight": (_Axis(_EXPERT, gated=True), 0),
    "local_experts.linear_fc2.weight": (_Axis(_EXPERT), 1),
    "word_embeddings.weight": (_VOCABULARY, 0),
    "output_layer.weight": (_VOCABULARY, 0),
}
"""End of a parameter's name, without the number of an expert → its axis and the dimension that is cut.

All other parameters are replicated.
"""
_NUMBER = re.compile(r"(?<=local_experts)\.\d+(?=\.)")


@dataclass(frozen=True)
class Sizes:
    """A model's sizes along its tensor axes, and the launch's tensor-parallel size."""

    tensor: int
    heads: int
    groups: int
    """Query groups; as many as heads without grouped-query attention."""
    channels: int
    """Elements of a head."""
    columns: int
    """Hidden size of the MLP."""
    gated: bool
    """True if the MLP's first weight is [gate; up]."""
    output_gate: bool
    """True if each head has a gate beside its query."""
    vocabulary: int
    """Padded size."""
    sequence: int
    sequence_parallel: bool
    """True if cells of several ranks slice the sequence: with Megatron's flag, and always in a model with experts."""
    shared_columns: int = 0
    """Hidden size of shared experts together; 0: there are none."""
    expert_columns: int = 0
    """Hidden size of an expert; 0: there are none."""
    experts: int = 0
    """Experts of a layer, where ranks share them; else 0."""
    expert_homes: int = 1
    """Into how many sets the experts are dealt: Megatron's expert-parallel size."""
    expert_parts: int = 1
    """Ranks with a part of each expert: Megatron's tensor-parallel size of experts."""

    @classmethod
    def of(cls, config: Any, vocabulary: int, sequence: int) -> Sizes:
        """Return the sizes of a model with Megatron's ``TransformerConfig``."""
        homes = getattr(config, "expert_model_parallel_size", 1) or 1
        return cls(
            tensor=config.tensor_model_parallel_size,
            heads=config.num_attention_heads,
            groups=config.num_query_groups or config.num_attention_heads,
            channels=config.kv_channels,
            columns=config.ffn_hidden_size,
            gated=bool(config.gated_linear_unit),
            output_gate=bool(getattr(config, "attention_output_gate", False)),
            vocabulary=vocabulary,
            sequence=sequence,
            sequence_parallel=bool(config.sequence_parallel or config.num_moe_experts),
            shared_columns=(config.moe_shared_expert_intermediate_size or 0) if config.num_moe_experts else 0,
            expert_columns=(config.moe_ffn_hidden_size or config.ffn_hidden_size) if config.num_moe_experts else 0,
            experts=config.num_moe_experts if homes > 1 else 0,
            expert_homes=homes,
            expert_parts=(getattr(config, "expert_tensor_parallel_size", 1) or 1) if homes > 1 else 1,
        )

    @property
    def cut_columns(self) -> dict[str, int]:
        """Kind of axis → columns that tensor-parallel ranks share; an expert's only where ranks share no experts."""
        expert = 0 if self.experts else self.expert_columns
        found = {_MLP: self.columns, _SHARED: self.shared_columns, _EXPERT: expert}
        return {kind: columns for kind, columns in found.items() if columns}


@dataclass(frozen=True)
class TensorShare:
    """The part of one position: intervals of the whole model's heads, query groups, MLP columns and vocabulary."""

    heads: Run
    groups: Run
    columns: Run
    vocabulary: Run
    sequence_parallel: bool
    shared: Run = (0, 0)
    """Columns of the shared experts."""
    expert: Run = (0, 0)
    """Columns of each expert, where ranks share no experts."""


def deal(total: int, parts: int) -> tuple[Run, ...]:
    """Return ``parts`` adjacent intervals of ``[0, total)`` whose sizes differ by at most one, larger ones first."""
    size, more = divmod(total, parts)
    stops = list(accumulate(size + (part < more) for part in range(parts)))
    return tuple(zip([0, *stops], stops, strict=False))


def refusal(sizes: Sizes, count: int) -> str:
    """Return why a cell of ``count`` ranks cannot compute the model; empty if it can."""
    groups = f"{sizes.groups} query groups of {sizes.heads // sizes.groups} heads"
    if -(-count // sizes.groups) > sizes.heads // sizes.groups:
        return f"{count} tensor-parallel ranks cannot share {groups}: each needs a head"
    for name, total in (*sizes.cut_columns.items(), ("rows of the vocabulary", sizes.vocabulary)):
        if total < count:
            return f"{count} tensor-parallel ranks cannot share {total} {name}"
    return ""


def share_of(sizes: Sizes, position: Position) -> TensorShare:
    """Return the share of one position. Raises ``ValueError`` with the :func:`refusal`."""
    reason = refusal(sizes, position.count)
    if reason:
        raise ValueError(reason)
    index, count = position.index, position.count
    each = sizes.heads // sizes.groups
    if count <= sizes.groups:
        groups = deal(sizes.groups, count)[index]
        heads = groups[0] * each, groups[1] * each
    else:
        of_group = deal(count, sizes.groups)
        group = next(number for number, (_, stop) in enumerate(of_group) if index < stop)
        first, stop = of_group[group]
        inside = deal(each, stop - first)[index - first]
        groups = group, group + 1
        heads = group * each + inside[0], group * each + inside[1]
    mine = {kind: deal(columns, count)[index] for kind, columns in sizes.cut_columns.items()}
    return TensorShare(
        heads=heads,
        groups=groups,
        columns=mine.get(_MLP, (0, 0)),
        vocabulary=deal(sizes.vocabulary, count)[index],
        sequence_parallel=sizes.sequence_parallel and is_sliced(count, sizes.sequence),
        shared=mine.get(_SHARED, (0, 0)),
        expert=mine.get(_EXPERT, (0, 0)),
    )


def is_cut(name: str) -> bool:
    """Return whether the parameter is cut over the tensor-parallel group; others are replicated."""
    return _cut(name) is not None


def launch_shape(sizes: Sizes, name: str, local: Sequence[int]) -> tuple[int, ...]:
    """Return the shape of a parameter as cut at the launch; ``local``: its shape in any cut."""
    cut = _cut(name)
    return tuple(local) if cut is None else _with(tuple(local), cut[1], _length(_launch_runs(sizes, cut[0], 0)))


def local_shape(sizes: Sizes, position: Position, name: str, launch: Sequence[int]) -> tuple[int, ...]:
    """Return the shape of a parameter at one position; ``launch``: its shape as cut at the launch."""
    cut = _cut(name)
    if cut is None or position.count == sizes.tensor:
        return tuple(launch)
    return _with(tuple(launch), cut[1], _length(_mine(sizes, cut[0], position)))


def overlaps_of(
    sizes: Sizes, position: Position, name: str, sharded: bool, launch: Sequence[int]
) -> tuple[Overlap, ...]:
    """Return the overlaps of a parameter at one position; ``launch``: its shape as cut at the launch.

    ``sharded``: tensor-parallel ranks have different parts of it. Raises ``ValueError`` if it is cut in an unknown way
    and the position is in a cell of another size than the launch's.
    """
    whole = tuple((0, size) for size in launch)
    if not sharded:
        return (Overlap(common_shard(sizes.tensor), whole, whole),)
    if position.count == sizes.tensor:
        return (Overlap(position.index, whole, whole),)
    cut = _cut(name)
    if cut is None:
        raise ValueError(f"parameter {name} differs between tensor-parallel ranks in an unknown way")
    axis, dim = cut
    mine = _mine(sizes, axis, position)
    return tuple(
        Overlap(shard, _with(whole, dim, here), _with(whole, dim, there))
        for shard in range(sizes.tensor)
        for here, there in _common(mine, _launch_runs(sizes, axis, shard))
    )


def covered_shards(sizes: Sizes, position: Position, names: Iterable[str]) -> tuple[int, ...]:
    """Return the shards, ascending, of which a position computes a part of the parameters ``names``.

    The common part is not among them. Raises ``ValueError`` with the :func:`refusal`.
    """
    found = set[int]()
    for axis in {cut[0] for name in names if (cut := _cut(name)) is not None}:
        mine = _mine(sizes, axis, position)
        found |= {shard for shard in range(sizes.tensor) if _common(mine, _launch_runs(sizes, axis, shard))}
    return tuple(sorted(found))


def expert_shape(sizes: Sizes, name: str, local: Sequence[int]) -> tuple[int, ...]:
    """Return the launch's shape of one part of an expert that ranks share; ``local``: its shape in any cut."""
    cut = _cut(name)
    if cut is None:
        return tuple(local)
    return _with(tuple(local), cut[1], _length(_even_runs(sizes, cut[0], Position(0, sizes.expert_parts))))


def expert_overlaps(
    sizes: Sizes, expert: int, part: Position, name: str, launch: Sequence[int]
) -> tuple[Overlap, ...] | None:
    """Return the overlaps of a weight of an expert that ranks share, on a rank that has ``part`` of it.

    ``launch``: the shape of one of the launch's parts, of which state has each in a shard of its own, behind those of
    the unit. ``None``: the rank has one of these, whole. Raises ``ValueError`` if it is cut in an unknown way.
    """
    if part.count == sizes.expert_parts:
        return None
    cut = _cut(name)
    if cut is None:
        raise ValueError(f"parameter {name} differs between parts of an expert in an unknown way")
    axis, dim = cut
    whole, mine = tuple((0, size) for size in launch), _even_runs(sizes, axis, part)
    first = common_shard(sizes.tensor) + 1 + expert * sizes.expert_parts
    return tuple(
        Overlap(first + one, _with(whole, dim, here), _with(whole, dim, there))
        for one in range(sizes.expert_parts)
        for here, there in _common(mine, _even_runs(sizes, axis, Position(one, sizes.expert_parts)))
    )


def _cut(name: str) -> tuple[_Axis, int] | None:
    """Return the axis and dimension along which the parameter is cut; ``None`` if it is replicated."""
    name = _NUMBER.sub("", name)
    return next((cut for end, cut in _CUTS.items() if name == end or name.endswith("." + end)), None)


def _mine(sizes: Sizes, axis: _Axis, position: Position) -> list[Run]:
    """Return a position's intervals of an axis; of as many ranks as at the launch they are the launch's."""
    if position.count == sizes.tensor:
        return _launch_runs(sizes, axis, position.index)
    return _runs(sizes, axis, share_of(sizes, position))


def _runs(sizes: Sizes, axis: _Axis, share: TensorShare) -> list[Run]:
    """Return a share's intervals of an axis, in the order of the local parameter."""
    if axis == _QKV:
        return _qkv_runs(sizes, share)
    if axis == _HEADS:
        return [(share.heads[0] * sizes.channels, share.heads[1] * sizes.channels)]
    if axis == _HEAD_NUMBERS:
        return [share.heads]
    if axis == _VOCABULARY:
        return [share.vocabulary]
    mine = {_MLP: share.columns, _SHARED: share.shared, _EXPERT: share.expert}[axis.kind]
    return _with_gate(sizes, axis, mine)


def _qkv_runs(sizes: Sizes, share: TensorShare) -> list[Run]:
    """Return rows of the fused weight, whose groups are [queries, gates if any, key, value]."""
    each, channels = sizes.heads // sizes.groups, sizes.channels
    queries = each * channels
    width = queries * (2 if sizes.output_gate else 1) + 2 * channels
    (first, stop), start = share.heads, share.groups[0] * width
    if stop - first == (share.groups[1] - share.groups[0]) * each:
        return [(start, share.groups[1] * width)]
    inside = (first - share.groups[0] * each) * channels, (stop - share.groups[0] * each) * channels
    rows = [inside]
    if sizes.output_gate:
        rows.append((queries + inside[0], queries + inside[1]))
    rows.append((width - 2 * channels, width))
    return [(start + a, start + b) for a, b in rows]


def _launch_runs(sizes: Sizes, axis: _Axis, shard: int) -> list[Run]:
    """Return the intervals of a launch shard: every axis is divided evenly."""
    if axis == _QKV:
        each = sizes.heads * (2 if sizes.output_gate else 1) + 2 * sizes.groups
        return [deal(each * sizes.channels, sizes.tensor)[shard]]
    if axis == _HEADS:
        return [deal(sizes.heads * sizes.channels, sizes.tensor)[shard]]
    if axis == _HEAD_NUMBERS:
        return [deal(sizes.heads, sizes.tensor)[shard]]
    if axis == _VOCABULARY:
        return [deal(sizes.vocabulary, sizes.tensor)[shard]]
    columns = sizes.cut_columns.get(axis.kind, 0)
    return _with_gate(sizes, axis, deal(columns, sizes.tensor)[shard])


def _even_runs(sizes: Sizes, axis: _Axis, part: Position) -> list[Run]:
    """Return the intervals of one of equal parts of an expert."""
    return _with_gate(sizes, axis, deal(sizes.expert_columns, part.count)[part.index])


def _with_gate(sizes: Sizes, axis: _Axis, columns: Run) -> list[Run]:
    """Return the intervals of a weight of an MLP with these hidden columns."""
    total = {_MLP: sizes.columns, _SHARED: sizes.shared_columns, _EXPERT: sizes.expert_columns}[axis.kind]
    gate = [(total + columns[0], total + columns[1])] if axis.gated and sizes.gated else []
    return [columns, *gate]


def _common(mine: Sequence[Run], theirs: Sequence[Run]) -> list[tuple[Run, Run]]:
    """Return the intersections of two lists of intervals, each as offsets into the first and into the second."""
    found = []
    at = 0
    for first, stop in mine:
        other = 0
        for begin, end in theirs:
            a, b = max(first, begin), min(stop, end)
            if a < b:
                found.append(((at + a - first, at + b - first), (other + a - begin, other + b - begin)))
            other += end - begin
        at += stop - first
    return found


def _length(runs: Sequence[Run]) -> int:
    return sum(stop - start for start, stop in runs)


def _with(items: tuple[T, ...], dim: int, item: T) -> tuple[T, ...]:
    return (*items[:dim], item, *items[dim + 1 :])
