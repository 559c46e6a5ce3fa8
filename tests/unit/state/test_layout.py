"""The layout of a unit is a pure function, and its blocks tile it."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.elastic.state.layout import ALIGN, ParamSpec, UnitLayout

SPECS = st.lists(
    st.tuples(st.integers(1, 700), st.booleans(), st.sampled_from([0.0, 1.0]), st.sampled_from([1.0, 2.0])),
    min_size=1,
    max_size=12,
)


def build(raw: list[tuple[int, bool, float, float]], shard: int, block_bytes: int) -> UnitLayout:
    specs = [ParamSpec(f"p{i}", n, (n,), s, w, lr) for i, (n, s, w, lr) in enumerate(raw)]
    return UnitLayout.build(3, shard, specs, block_bytes)


@given(SPECS, st.integers(0, 2), st.integers(16, 200).map(lambda q: q * 64))
def test_blocks_and_runs_tile_the_unit_and_every_parameter_lies_once(raw, shard, block_bytes):
    layout = build(raw, shard, block_bytes)
    edges = [0, *[b.stop for b in layout.blocks]]
    assert [b.start for b in layout.blocks] == edges[:-1] and edges[-1] == layout.numel
    assert all(0 < b.numel * 4 <= block_bytes and b.start % ALIGN == 0 for b in layout.blocks)
    for block in layout.blocks:
        runs = layout.runs(block)
        assert [block.start, *[r.stop for r in runs]] == [*[r.start for r in runs], block.stop]
    taken = sorted((s.start, s.stop) for s in layout.slots)
    assert all(stop <= start for (_, stop), (start, _) in pairwise(taken))
    assert all(s.start % ALIGN == 0 and s.stop - s.start == s.spec.numel for s in layout.slots)
    assert [s.spec.sharded for s in layout.slots] == sorted((s.spec.sharded for s in layout.slots), reverse=True)


@given(SPECS, st.integers(16, 200).map(lambda q: q * 64))
def test_runs_carry_each_element_its_own_parameters_multipliers(raw, block_bytes):
    layout = build(raw, 0, block_bytes)
    for block in layout.blocks:
        for run in layout.runs(block):
            for slot in layout.slots:
                if slot.start < run.stop and run.start < slot.stop:
                    assert (slot.spec.weight_decay_multiplier, slot.spec.lr_multiplier) == (run.wd_mult, run.lr_mult)


@given(SPECS)
def test_sizes_of_blocks_differ_by_at_most_one_quantum(raw):
    sizes = [block.numel for block in build(raw, 0, 1024).blocks]
    assert max(sizes) - min(sizes) <= ALIGN


@pytest.mark.parametrize(
    ("elements", "expert", "blocks"),
    [
        (1_000, None, 1),
        (10 << 16, None, 10),
        (16 << 20, None, 64),
        (256 << 20, None, 64),
        (2 << 30, None, 128),
        (10 << 16, 3, 4),
        (44 << 20, 3, 4),
        (176 << 20, 3, 11),
    ],
)
def test_without_a_size_large_spaces_are_cut_into_64_blocks_and_experts_into_4_from_256_kib_to_64_mib(
    elements, expert, blocks
):
    layout = UnitLayout.build(0, 0, [ParamSpec("weight", elements, (elements,), True, expert=expert)])
    assert len(layout.blocks) == blocks


def test_bad_input_is_refused_by_name():
    with pytest.raises(ValueError, match="p0"):
        ParamSpec("p0", 7, (2, 3), True)
    with pytest.raises(ValueError, match="duplicate"):
        UnitLayout.build(0, 0, [ParamSpec("a", 1, (1,), True)] * 2, 1024)
    with pytest.raises(ValueError, match="block-bytes"):
        UnitLayout.build(0, 0, [ParamSpec("a", 1, (1,), True)], 32)
