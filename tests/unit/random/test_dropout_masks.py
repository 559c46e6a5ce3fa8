"""An element's mask depends on its sample and its place in the whole activation, and on nothing else."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron.elastic import _random
from megatron.elastic.engine.compute.dropout import (
    DropoutKey,
    SampleDropout,
    Section,
    Site,
    Split,
    _Mask,
    dropout_scope,
    sample_dropout,
)
from megatron.elastic.engine.compute.philox import keep_mask, philox

P = 0.25
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.float64: 3}


def ones_dropped(
    key: DropoutKey,
    shape: tuple[int, ...],
    sample_dim: int,
    extent: tuple[int, ...],
    offset: tuple[int, ...],
    unit: int = 3,
    site: int = 1,
) -> Tensor:
    """The mask itself: what is left of a tensor of ones, as booleans."""
    with dropout_scope(key):
        out = sample_dropout(
            torch.ones(shape), P, unit=unit, site=site, sample_dim=sample_dim, extent=extent, offset=offset
        )
    return out != 0


# Known answers published with the generator (Random123's kat_vectors, philox4x32 10).
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN)
def test_the_generator_gives_its_published_answers(counter, key, words):
    assert tuple(_random.philox(counter, key)) == words
    assert tuple(philox(counter, key)) == words
    as_tensors = philox([torch.tensor([c], dtype=torch.int64) for c in counter], key)
    assert tuple(int(w) for w in as_tensors) == words


@settings(deadline=None, max_examples=60)
@given(
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=3),
    inner=st.integers(1, 200),
    data=st.data(),
)
def test_every_instruction_set_and_the_tensor_form_give_the_same_bits(sizes, inner, data):
    shape = [*sizes, inner]
    sample_dim = data.draw(st.integers(0, len(shape) - 1))
    slack = data.draw(
        st.lists(st.tuples(st.integers(0, 70), st.integers(0, 5)), min_size=len(sizes), max_size=len(sizes))
    )
    local = [s for d, s in enumerate(shape) if d != sample_dim]
    offset = [before for before, _ in slack]
    extent = [size + before + after for size, (before, after) in zip(local, slack, strict=True)]
    samples = data.draw(st.lists(st.integers(0, 2**63 - 1), min_size=shape[sample_dim], max_size=shape[sample_dim]))
    where = {
        "sizes": shape,
        "sample_dim": sample_dim,
        "extent": extent,
        "offset": offset,
        "samples": samples,
        "seed": data.draw(st.integers(0, 2**64 - 1)),
        "step": data.draw(st.integers(0, 2**63 - 1)),
        "unit": data.draw(st.integers(0, 2**32 - 1)),
        "site": data.draw(st.integers(0, 2**32 - 1)),
        "drop_below": data.draw(st.integers(0, 2**32 - 1)),
    }
    keep = keep_mask(**where, device=torch.device("cpu"))
    dtype = data.draw(st.sampled_from(list(DTYPES)))
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    residual = torch.randn(shape, generator=torch.Generator().manual_seed(2)).to(dtype)
    scale = 1 / 0.9
    dropped = torch.where(keep, x * scale, torch.zeros((), dtype=dtype))
    for isa in range(_random.widest_isa() + 1):
        for add, expected in ((None, dropped), (residual, residual + dropped)):
            out = torch.empty_like(x)
            _random.dropout(
                dst=out.data_ptr(),
                src=x.data_ptr(),
                residual=0 if add is None else add.data_ptr(),
                bytes=x.nbytes,
                dtype=DTYPES[dtype],
                scale=scale,
                isa=isa,
                **where,
            )
            assert torch.equal(out, expected), (isa, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_device_without_a_kernel_of_ours_gives_the_same_bits(dtype, monkeypatch):
    monkeypatch.setattr("megatron.elastic.engine.compute.dropout._triton_kernel", lambda: None)
    key = DropoutKey(-3, 5, (7, 1 << 40, 9))
    mask = _Mask(key, P, unit=2, site=1, sample_dim=1, extent=(9, 130), offset=(4, 65))
    x, residual = torch.randn(5, 3, 65).to(dtype), torch.randn(5, 3, 65).to(dtype)
    assert torch.equal(mask._on_device(x, None), mask.apply(x, None))
    assert torch.equal(mask._on_device(x, residual), mask.apply(x, residual))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_half_precision_value_rounds_as_torch_rounds(dtype):
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    for scale in (1 / 0.9, 1 / 0.5, 1 / 0.3):
        expected = (every.float() * torch.tensor(scale, dtype=torch.float32)).to(dtype)
        for isa in range(_random.widest_isa() + 1):
            out = torch.empty_like(every)
            _random.dropout(
                dst=out.data_ptr(),
                src=every.data_ptr(),
                residual=0,
                bytes=every.nbytes,
                dtype=DTYPES[dtype],
                sizes=[1, every.numel()],
                sample_dim=0,
                extent=[every.numel()],
                offset=[0],
                samples=[0],
                seed=0,
                step=0,
                unit=0,
                site=0,
                drop_below=0,
                scale=scale,
                isa=isa,
            )
            number = ~expected.isnan()
            assert torch.equal(out[number].view(torch.int16), expected[number].view(torch.int16)), (isa, scale)
            assert bool(out[~number].isnan().all()), (isa, scale)


@settings(deadline=None, max_examples=40)
@given(rows=st.integers(1, 6), s=st.integers(1, 10), h=st.integers(1, 130), cut=st.data())
def test_a_sample_has_the_same_mask_alone_and_in_any_batch(rows, s, h, cut):
    samples = tuple(cut.draw(st.permutations(range(40, 40 + rows))))
    whole = ones_dropped(DropoutKey(1, 2, samples), (s, rows, h), 1, (s, h), (0, 0))
    at = cut.draw(st.integers(0, rows))
    for part in (range(0, at), range(at, rows)):
        if len(part):
            piece = ones_dropped(
                DropoutKey(1, 2, tuple(samples[r] for r in part)), (s, len(part), h), 1, (s, h), (0, 0)
            )
            assert torch.equal(piece, whole[:, list(part)])


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("shape", [(3, 8, 12, 12), (2, 4, 33, 17)])
def test_tensor_parallel_slices_of_heads_form_the_whole_mask(size, shape):
    key = DropoutKey(7, 11, tuple(range(shape[0])))
    x = torch.ones(shape)
    with dropout_scope(key):
        whole = SampleDropout(P, unit=5, site=Site.ATTENTION_PROBS, sample_dim=0)(x)
        parts = [
            SampleDropout(P, unit=5, site=Site.ATTENTION_PROBS, sample_dim=0, split=Split(1, rank, size))(chunk)
            for rank, chunk in enumerate(x.chunk(size, dim=1))
        ]
    assert torch.equal(torch.cat(parts, dim=1), whole)
    assert 0 < int((whole == 0).sum()) < whole.numel()


@pytest.mark.parametrize("sizes", [(3, 3, 2), (5, 2, 1), (8,)])
def test_slices_of_unequal_numbers_of_heads_form_the_whole_mask(sizes):
    key = DropoutKey(7, 11, (2, 0))
    x = torch.ones(2, 8, 12, 12)
    parts, start = [], 0
    with dropout_scope(key):
        whole = SampleDropout(P, unit=5, site=Site.ATTENTION_PROBS, sample_dim=0)(x)
        for chunk in x.split(sizes, dim=1):
            section = Section(1, start, 8)
            parts.append(SampleDropout(P, unit=5, site=Site.ATTENTION_PROBS, sample_dim=0, split=section)(chunk))
            start += chunk.shape[1]
        assert torch.equal(torch.cat(parts, dim=1), whole)
        with pytest.raises(ValueError, match="4 elements from 5 lie outside of 8"):
            SampleDropout(P, unit=5, site=Site.ATTENTION_PROBS, sample_dim=0, split=Section(1, 5, 8))(x[:, :4])


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("hidden", [16, 64, 100])
def test_sequence_parallel_slices_form_the_whole_mask(size, hidden):
    key = DropoutKey(7, 11, (3, 1, 4))
    x = torch.ones(16, 3, hidden)
    with dropout_scope(key):
        whole = SampleDropout(P, unit=0, site=Site.EMBEDDING, sample_dim=1)(x)
        parts = [
            SampleDropout(P, unit=0, site=Site.EMBEDDING, sample_dim=1, split=Split(0, rank, size))(chunk)
            for rank, chunk in enumerate(x.chunk(size, dim=0))
        ]
    assert torch.equal(torch.cat(parts, dim=0), whole)


def test_memory_layout_of_the_input_does_not_matter():
    key = DropoutKey(1, 1, (0, 1, 2))
    straight = torch.randn(6, 3, 20)
    turned = straight.transpose(0, 2).contiguous().transpose(0, 2)
    assert not turned.is_contiguous()
    module = SampleDropout(P, unit=0, site=Site.MLP_OUTPUT, sample_dim=1)
    with dropout_scope(key):
        assert torch.equal(module(straight), module(turned))


def test_each_part_of_the_key_changes_the_mask():
    def mask(seed=1, step=1, sample=1, unit=1, site=1):
        return ones_dropped(DropoutKey(seed, step, (sample,)), (1, 4096), 0, (4096,), (0,), unit, site)

    base = mask()
    for change in (
        {"seed": 2},
        {"seed": 1 + 2**32},
        {"seed": -1},
        {"step": 2},
        {"step": 1 + 2**32},
        {"sample": 2},
        {"sample": 1 + 2**32},
        {"unit": 2},
        {"site": 2},
    ):
        other = mask(**change)
        assert 0.25 < float((base != other).float().mean()) < 0.5, change  # independent: 2 p (1-p) = 0.375


def test_coordinates_past_2_to_the_32_do_not_wrap():
    far = (1 << 38) + 64
    near = ones_dropped(DropoutKey(1, 1, (0,)), (1, 640), 0, (1 << 40,), (64,))
    beyond = ones_dropped(DropoutKey(1, 1, (0,)), (1, 640), 0, (1 << 40,), (far,))
    assert 0.25 < float((near != beyond).float().mean()) < 0.5


def test_misplaced_slices_and_miscounted_samples_are_refused():
    with dropout_scope(DropoutKey(0, 0, (1, 2))):
        with pytest.raises(ValueError, match=r"3 rows .* names 2 samples"):
            sample_dropout(torch.ones(3, 4), P, unit=0, site=0, sample_dim=0, extent=(4,), offset=(0,))
        with pytest.raises(ValueError, match="outside extent"):
            sample_dropout(torch.ones(2, 4), P, unit=0, site=0, sample_dim=0, extent=(6,), offset=(3,))
        with pytest.raises(ValueError, match="probability"):
            sample_dropout(torch.ones(2, 4), 1.5, unit=0, site=0, sample_dim=0, extent=(4,), offset=(0,))
    with pytest.raises(RuntimeError, match="outside dropout_scope"):
        sample_dropout(torch.ones(2, 4), P, unit=0, site=0, sample_dim=0, extent=(4,), offset=(0,))
    x = torch.ones(2, 4)
    with pytest.raises(ValueError, match="byte count"):
        _random.dropout(
            dst=x.data_ptr(),
            src=x.data_ptr(),
            residual=0,
            bytes=x.nbytes + 4,
            dtype=0,
            sizes=[2, 4],
            sample_dim=0,
            extent=[4],
            offset=[0],
            samples=[0, 1],
            seed=0,
            step=0,
            unit=0,
            site=0,
            drop_below=1,
            scale=1.0,
        )
