"""The cut over n ranks covers the launch's shards, whatever the sizes; attention's shares are those it can compute."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.elastic.mcore.model.tensor_cut import (
    LAYER_NAMES,
    Sizes,
    TensorShare,
    covered_shards,
    deal,
    expert_overlaps,
    expert_shape,
    is_cut,
    launch_shape,
    local_shape,
    overlaps_of,
    refusal,
    share_of,
)
from megatron.elastic.state.coverage import Overlap, Position, add, common_shard, read

HIDDEN = 3
ENDS = ("word_embeddings.weight", "output_layer.weight")
"""Cut parameters outside of layers."""
EXAMPLES = 60


@st.composite
def models(draw: st.DrawFn) -> Sizes:
    """Sizes that Megatron accepts at the launch: T divides each axis, and the groups, or is a multiple of them."""
    tensor = draw(st.sampled_from([1, 2, 3, 4]))
    groups = draw(st.sampled_from([tensor, 2 * tensor, 3 * tensor, *(d for d in range(1, tensor) if tensor % d == 0)]))
    each = draw(st.integers(1, 4)) * (tensor // groups if groups < tensor else 1)
    return Sizes(
        tensor=tensor,
        heads=groups * each,
        groups=groups,
        channels=draw(st.integers(1, 3)) * (tensor if groups < tensor else 1),
        columns=tensor * draw(st.integers(2, 5)),
        gated=draw(st.booleans()),
        output_gate=draw(st.booleans()),
        vocabulary=tensor * draw(st.integers(2, 6)),
        sequence=tensor * draw(st.integers(1, 6)),
        sequence_parallel=draw(st.booleans()),
        shared_columns=tensor * draw(st.integers(0, 4)),
        expert_columns=tensor * draw(st.integers(0, 4)),
    )


@st.composite
def cells(draw: st.DrawFn) -> tuple[Sizes, int]:
    """A model and a number of ranks that can compute it."""
    sizes = draw(models())
    return sizes, draw(st.sampled_from([count for count in range(1, 9) if not refusal(sizes, count)]))


def whole_shapes(sizes: Sizes) -> dict[str, tuple[int, ...]]:
    """Every cut parameter, and one that is not, in the shape of a model on one rank."""
    rows = (sizes.heads * (1 + sizes.output_gate) + 2 * sizes.groups) * sizes.channels
    fc1, shared, expert = (n * (1 + sizes.gated) for n in (sizes.columns, sizes.shared_columns, sizes.expert_columns))
    beside = {
        "mlp.shared_experts.linear_fc1.weight": (shared, HIDDEN),
        "mlp.shared_experts.linear_fc2.weight": (HIDDEN, sizes.shared_columns),
    }
    routed = {
        "mlp.experts.local_experts.3.linear_fc1.weight": (expert, HIDDEN),
        "mlp.experts.local_experts.3.linear_fc2.weight": (HIDDEN, sizes.expert_columns),
        "mlp.router.weight": (4, HIDDEN),
    }
    return {
        **(beside if shared else {}),
        **(routed if expert else {}),
        "self_attention.linear_qkv.weight": (rows, HIDDEN),
        "self_attention.linear_qkv.bias": (rows,),
        "self_attention.linear_proj.weight": (HIDDEN, sizes.heads * sizes.channels),
        "self_attention.core_attention.softmax_offset": (sizes.heads,),
        "mlp.linear_fc1.weight": (fc1, HIDDEN),
        "mlp.linear_fc1.bias": (fc1,),
        "mlp.linear_fc2.weight": (HIDDEN, sizes.columns),
        "word_embeddings.weight": (sizes.vocabulary, HIDDEN),
        "output_layer.weight": (sizes.vocabulary, HIDDEN),
        "input_layernorm.weight": (HIDDEN,),
    }


def at_launch(sizes: Sizes, name: str) -> tuple[int, ...]:
    return launch_shape(sizes, name, whole_shapes(sizes)[name])


def overlaps(sizes: Sizes, position: Position, name: str) -> tuple[Overlap, ...]:
    return overlaps_of(sizes, position, name, is_cut(name), at_launch(sizes, name))


def built_shape(sizes: Sizes, position: Position, name: str) -> tuple[int, ...]:
    """The shape of Megatron's parameter in a layer that is built with the sizes of a share."""
    if position.count == sizes.tensor:
        return at_launch(sizes, name)
    share = share_of(sizes, position)
    (heads, groups, columns, vocabulary, shared, expert) = (
        stop - start
        for start, stop in (share.heads, share.groups, share.columns, share.vocabulary, share.shared, share.expert)
    )
    alone = replace(sizes, tensor=1, heads=heads, groups=groups, columns=columns, vocabulary=vocabulary)
    return whole_shapes(replace(alone, shared_columns=shared, expert_columns=expert))[name]


def numbered(sizes: Sizes, name: str) -> list[torch.Tensor]:
    """The tensors of all shards, with another number in each element; replicated ones in the common shard only."""
    shape = at_launch(sizes, name)
    count = sizes.tensor if is_cut(name) else common_shard(sizes.tensor) + 1
    return [1.0 + torch.arange(math.prod(shape)).view(shape) + 10_000 * shard for shard in range(count)]


@settings(max_examples=EXAMPLES, deadline=None)
@given(cells())
def test_the_patches_of_all_positions_cover_every_element_of_every_shard(cell: tuple[Sizes, int]) -> None:
    sizes, count = cell
    for name in filter(is_cut, whole_shapes(sizes)):
        covered = [torch.zeros_like(shard) for shard in numbered(sizes, name)]
        for index in range(count):
            local = torch.ones(built_shape(sizes, Position(index, count), name))
            add(
                overlaps(sizes, Position(index, count), name),
                local,
                covered.__getitem__,
            )
        assert all(bool((part >= 1).all()) for part in covered), name
        if "linear_qkv" not in name or count in (sizes.tensor, *range(1, sizes.groups + 1)):
            assert all(bool((part == 1).all()) for part in covered), f"{name} is covered more than once"


@settings(max_examples=EXAMPLES, deadline=None)
@given(cells())
def test_the_patches_of_a_local_parameter_fill_it_exactly_once(cell: tuple[Sizes, int]) -> None:
    sizes, count = cell
    for name in whole_shapes(sizes):
        for index in range(count):
            position = Position(index, count)
            local = torch.zeros(built_shape(sizes, position, name))
            assert local_shape(sizes, position, name, at_launch(sizes, name)) == local.shape
            found = overlaps(sizes, position, name)
            read(found, local, numbered(sizes, name).__getitem__)
            assert bool((local > 0).all()), name
            assert sum(math.prod(b - a for a, b in overlap.local) for overlap in found) == local.numel(), name


@settings(max_examples=EXAMPLES, deadline=None)
@given(models(), st.lists(st.integers(1, 8), min_size=1, max_size=4))
def test_values_that_went_through_cells_of_any_sizes_have_the_bits_that_they_had(
    sizes: Sizes, counts: list[int]
) -> None:
    """Each rank of a cell reads its part, and writes it where a rank of the next cell reads."""
    through = [count for count in counts if not refusal(sizes, count)]
    for name in whole_shapes(sizes):
        first = numbered(sizes, name)
        shards = first
        for count in through:
            written = [torch.zeros_like(shard) for shard in shards]
            for index in range(count):
                position = Position(index, count)
                local, found = torch.zeros(built_shape(sizes, position, name)), overlaps(sizes, position, name)
                read(found, local, shards.__getitem__)
                for one in found:
                    here, there = (tuple(slice(*side) for side in box) for box in (one.local, one.remote))
                    written[one.shard][there] = local[here]
            if not is_cut(name):
                written[:-1] = shards[:-1]
            shards = written
        assert all(torch.equal(now, then) for now, then in zip(shards, first, strict=True)), name


@st.composite
def dealt(draw: st.DrawFn) -> tuple[Sizes, int]:
    """A model whose ranks share experts that are cut at launch, and a number of parts in which a cell has them."""
    parts = draw(st.sampled_from([1, 2, 3, 4, 6]))
    fewer = draw(st.sampled_from([n for n in range(1, parts + 1) if parts % n == 0]))
    base = replace(draw(models()), tensor=parts * draw(st.integers(1, 2)))
    return replace(base, experts=4, expert_homes=2, expert_parts=parts, expert_columns=parts * 3), fewer


@settings(max_examples=EXAMPLES, deadline=None)
@given(dealt(), st.integers(0, 3))
def test_a_rank_with_several_of_the_launchs_parts_of_an_expert_has_these_whole(
    deal_of: tuple[Sizes, int], expert: int
) -> None:
    """Its weights are those that Megatron builds for fewer parts; each element lies in one shard of the expert."""
    sizes, parts = deal_of
    first = common_shard(sizes.tensor) + 1 + expert * sizes.expert_parts
    for name, shape in whole_shapes(sizes).items():
        if "local_experts" not in name:
            continue
        dim = 0 if "fc1" in name else 1
        launch = expert_shape(sizes, name, shape)
        assert launch[dim] * sizes.expert_parts == shape[dim]
        covered = {first + one: torch.zeros(launch) for one in range(sizes.expert_parts)}
        for index in range(parts):
            found = expert_overlaps(sizes, expert, Position(index, parts), name, launch)
            if parts == sizes.expert_parts:
                assert found is None
                continue
            assert found is not None
            each = sizes.expert_parts // parts
            assert {one.shard for one in found} == set(range(first + index * each, first + (index + 1) * each))
            add(
                found,
                torch.ones(whole_shapes(replace(sizes, expert_columns=sizes.expert_columns // parts))[name]),
                covered.__getitem__,
            )
        assert parts == sizes.expert_parts or all(bool((shard == 1).all()) for shard in covered.values())


@settings(max_examples=EXAMPLES, deadline=None)
@given(models())
def test_with_the_launch_size_each_parameter_is_one_whole_patch_of_its_own_shard(sizes: Sizes) -> None:
    for name in whole_shapes(sizes):
        shape = at_launch(sizes, name)
        box = tuple((0, size) for size in shape)
        for index in range(sizes.tensor):
            shard = index if is_cut(name) else common_shard(sizes.tensor)
            assert overlaps(sizes, Position(index, sizes.tensor), name) == (Overlap(shard, box, box),)


@settings(max_examples=EXAMPLES, deadline=None)
@given(cells())
def test_a_layer_on_one_rank_has_the_shards_side_by_side(cell: tuple[Sizes, int]) -> None:
    """Reading n positions and putting them side by side by heads and columns gives the parameter of one rank."""
    sizes, count = cell
    alone = Position(0, 1)
    for name, dim in (
        ("mlp.linear_fc2.weight", 1),
        ("mlp.shared_experts.linear_fc2.weight", 1),
        ("mlp.experts.local_experts.3.linear_fc2.weight", 1),
        ("self_attention.linear_proj.weight", 1),
        ("self_attention.core_attention.softmax_offset", 0),
        ("output_layer.weight", 0),
    ):
        if name not in whole_shapes(sizes):
            continue
        shards = numbered(sizes, name)
        one = torch.zeros(whole_shapes(sizes)[name])
        read(overlaps(sizes, alone, name), one, shards.__getitem__)
        assert torch.equal(one, torch.cat(shards, dim))
        parts = []
        for index in range(count):
            part = torch.zeros(built_shape(sizes, Position(index, count), name))
            read(
                overlaps(sizes, Position(index, count), name),
                part,
                shards.__getitem__,
            )
            parts.append(part)
        assert torch.equal(torch.cat(parts, dim), one)


@settings(max_examples=EXAMPLES, deadline=None)
@given(cells())
def test_shares_tile_each_axis_evenly_and_heads_lie_in_the_groups_of_their_rank(cell: tuple[Sizes, int]) -> None:
    sizes, count = cell
    shares = [share_of(sizes, Position(index, count)) for index in range(count)]
    each = sizes.heads // sizes.groups
    for runs, total in (
        ([share.columns for share in shares], sizes.columns),
        ([share.vocabulary for share in shares], sizes.vocabulary),
        ([share.heads for share in shares], sizes.heads),
    ):
        assert [runs[0][0], runs[-1][1]] == [0, total]
        assert all(before[1] == after[0] for before, after in pairwise(runs))
        assert all(start < stop for start, stop in runs)
    for share in shares:
        assert share.groups == (share.heads[0] // each, (share.heads[1] - 1) // each + 1)
        if count > sizes.groups:
            assert share.groups[1] - share.groups[0] == 1
        else:
            assert (share.heads[1] - share.heads[0]) % each == 0


SIZES = Sizes(
    tensor=4,
    heads=8,
    groups=4,
    channels=2,
    columns=40,
    gated=True,
    output_gate=False,
    vocabulary=64,
    sequence=16,
    sequence_parallel=True,
)


def test_three_ranks_of_a_launch_with_four_share_unevenly_with_the_larger_parts_first() -> None:
    assert share_of(SIZES, Position(0, 3)) == TensorShare((0, 4), (0, 2), (0, 14), (0, 22), False)
    assert share_of(SIZES, Position(1, 3)) == TensorShare((4, 6), (2, 3), (14, 27), (22, 43), False)
    assert share_of(SIZES, Position(2, 3)) == TensorShare((6, 8), (3, 4), (27, 40), (43, 64), False)


def test_ranks_that_share_a_group_divide_its_heads_and_each_read_its_key_and_value() -> None:
    sizes = replace(SIZES, heads=8, groups=2)
    assert [share_of(sizes, Position(i, 3)).heads for i in range(3)] == [(0, 2), (2, 4), (4, 8)]
    assert [share_of(sizes, Position(i, 3)).groups for i in range(3)] == [(0, 1), (0, 1), (1, 2)]
    first, second = (
        [(p.shard, p.remote) for p in overlaps_of(sizes, Position(i, 3), "self_attention.linear_qkv.bias", True, (6,))]
        for i in range(2)
    )
    assert first[-1] == second[-1] == (1, ((2, 6),)), "both read the key and value of group 0"
    assert not set(first[:-1]) & set(second[:-1]), "each reads its own queries"


def test_sequence_parallelism_is_on_only_where_the_ranks_divide_the_sequence() -> None:
    assert [share_of(SIZES, Position(0, n)).sequence_parallel for n in (1, 2, 3, 4)] == [False, True, False, True]
    assert not share_of(replace(SIZES, sequence_parallel=False), Position(0, 2)).sequence_parallel


@pytest.mark.parametrize(
    ("sizes", "count", "reason"),
    [
        (SIZES, 9, "9 tensor-parallel ranks cannot share 4 query groups of 2 heads: each needs a head"),
        (replace(SIZES, columns=4), 5, "5 tensor-parallel ranks cannot share 4 MLP columns"),
        (
            replace(SIZES, shared_columns=4),
            5,
            "5 tensor-parallel ranks cannot share 4 columns of shared experts",
        ),
        (replace(SIZES, expert_columns=4), 5, "5 tensor-parallel ranks cannot share 4 columns of an expert"),
        (replace(SIZES, vocabulary=4), 5, "5 tensor-parallel ranks cannot share 4 rows of the vocabulary"),
    ],
)
def test_more_ranks_than_parts_are_refused_in_one_line(sizes: Sizes, count: int, reason: str) -> None:
    assert refusal(sizes, count) == reason
    with pytest.raises(ValueError, match="cannot share"):
        share_of(sizes, Position(0, count))


@settings(max_examples=EXAMPLES, deadline=None)
@given(cells())
def test_the_covered_shards_are_those_that_the_patches_name(cell: tuple[Sizes, int]) -> None:
    sizes, count = cell
    for index in range(count):
        position = Position(index, count)
        cut = [name for name in whole_shapes(sizes) if is_cut(name) and not name.endswith(ENDS)]
        shards = {p.shard for name in cut for p in overlaps(sizes, position, name)}
        assert covered_shards(sizes, position, LAYER_NAMES) == tuple(sorted(shards))
        biases = ("self_attention.linear_qkv.bias", "mlp.linear_fc1.bias", "input_layernorm.weight")
        assert set(covered_shards(sizes, position, biases)) <= shards, "a layer's biases need no further shards"
    assert covered_shards(sizes, Position(0, count), ["input_layernorm.weight"]) == ()


@given(st.integers(0, 50), st.integers(1, 9))
def test_dealt_parts_tile_and_differ_by_at_most_one(total: int, parts: int) -> None:
    runs = deal(total, parts)
    sizes = [stop - start for start, stop in runs]
    assert sum(sizes) == total and sizes == sorted(sizes, reverse=True) and max(sizes) - min(sizes) <= 1


def test_a_parameter_cut_in_an_unknown_way_is_held_in_cells_of_the_launch_size_alone() -> None:
    """As the projections of latent attention are: their parts are the launch's, or the cell cannot compute."""
    name, shape = "self_attention.linear_q_up_proj.weight", (12, 4)
    box = tuple((0, size) for size in shape)
    assert overlaps_of(SIZES, Position(1, SIZES.tensor), name, True, shape) == (Overlap(1, box, box),)
    with pytest.raises(ValueError, match="linear_q_up_proj"):
        overlaps_of(SIZES, Position(0, SIZES.tensor + 1), name, True, shape)
