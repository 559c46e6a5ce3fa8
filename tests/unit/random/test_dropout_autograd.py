"""Dropout as an operator: values, gradients, recomputation, evaluation, and the layer's fused form."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from megatron.elastic.engine.compute.dropout import (
    BiasDropoutAdd,
    DropoutKey,
    SampleDropout,
    Site,
    Split,
    current_key,
    dropout_scope,
    sample_dropout,
)

KEY = DropoutKey(seed=1, step=4, samples=(8, 9, 10))
WHERE: dict[str, Any] = {"unit": 2, "site": Site.MLP_OUTPUT, "sample_dim": 1, "extent": (5, 7), "offset": (0, 0)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("p", [0.1, 0.5])
def test_kept_elements_are_scaled_and_dropped_ones_are_zero(dtype, p):
    x = torch.randn(5, 3, 7).to(dtype)
    x[0, 0, :] = float("nan")
    with dropout_scope(KEY):
        kept = sample_dropout(torch.ones(5, 3, 7), p, **WHERE) != 0
        y = sample_dropout(x, p, **WHERE)
    assert y.dtype == dtype and y.shape == x.shape
    assert torch.equal(y[~kept], torch.zeros_like(y[~kept]))
    torch.testing.assert_close(y[kept], (x * (1 / (1 - p)))[kept], rtol=0, atol=0, equal_nan=True)


def test_gradients_agree_with_finite_differences_to_second_order():
    x = torch.randn(5, 3, 7, dtype=torch.float64, requires_grad=True)
    residual = torch.randn(5, 3, 7, dtype=torch.float64, requires_grad=True)
    with dropout_scope(KEY):
        assert torch.autograd.gradcheck(lambda a, r: sample_dropout(a, 0.3, **WHERE, residual=r), (x, residual))
        assert torch.autograd.gradgradcheck(lambda a: sample_dropout(a**2, 0.3, **WHERE), (x,))


def test_backward_uses_the_mask_of_its_forward_whatever_scope_it_runs_in():
    x = torch.randn(5, 3, 7, requires_grad=True)
    with dropout_scope(KEY):
        y = sample_dropout(x, 0.4, **WHERE)
    with dropout_scope(DropoutKey(99, 99, (0,))):
        y.sum().backward()
    assert x.grad is not None and torch.equal(x.grad.ne(0), y.ne(0))


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputation_regenerates_the_same_masks(reentrant):
    torch.manual_seed(0)
    weight = torch.randn(7, 7, requires_grad=True)
    x = torch.randn(5, 3, 7, requires_grad=True)
    inner = SampleDropout(0.4, unit=1, site=Site.ATTENTION_OUTPUT, sample_dim=1)
    outer = SampleDropout(0.4, unit=1, site=Site.MLP_OUTPUT, sample_dim=1)

    def block(a):
        return outer(torch.tanh(inner(a @ weight) @ weight)) ** 2

    def run(recompute):
        x.grad = weight.grad = None
        with dropout_scope(KEY):
            out = checkpoint(block, x, use_reentrant=reentrant) if recompute else block(x)
            out.sum().backward()
        return out, x.grad, weight.grad

    for plain, again in zip(run(False), run(True), strict=True):
        assert torch.equal(plain, again)


def test_evaluation_and_zero_probability_cost_nothing():
    x = torch.randn(5, 3, 7)
    off = SampleDropout(0.0, unit=1, site=Site.EMBEDDING, sample_dim=1)
    evaluating = SampleDropout(0.5, unit=1, site=Site.EMBEDDING, sample_dim=1).eval()
    assert off(x) is x and evaluating(x) is x


def test_probability_one_drops_everything():
    with dropout_scope(KEY):
        assert int(sample_dropout(torch.ones(5, 3, 7), 1.0, **WHERE).count_nonzero()) == 0


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize(
    ("dtype", "stream"),
    [(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float32)],
)
def test_bias_dropout_add_is_the_three_operators_in_one(training, with_bias, dtype, stream):
    torch.manual_seed(1)
    x, bias = torch.randn(5, 3, 7).to(dtype).requires_grad_(), torch.randn(7).to(dtype).requires_grad_()
    residual = torch.randn(5, 3, 7).to(stream).requires_grad_()
    bda = BiasDropoutAdd(unit=2, site=Site.MLP_OUTPUT)
    inputs = (x, residual, bias) if with_bias else (x, residual)
    with dropout_scope(KEY):
        out = bda(training, True)((x, bias if with_bias else None), residual, 0.3)
        wide = x.to(stream) + (bias.to(stream) if with_bias else 0)
        expected = residual + (sample_dropout(wide, 0.3, **WHERE) if training else wide)
        grad = torch.randn(5, 3, 7).to(stream)
        got, want = torch.autograd.grad(out, inputs, grad), torch.autograd.grad(expected, inputs, grad)
    assert out.dtype == stream and torch.equal(out, expected)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_bias_dropout_add_slices_the_sequence_as_sequence_parallelism_does():
    x, residual = torch.randn(8, 3, 7), torch.randn(8, 3, 7)
    with dropout_scope(KEY):
        whole = BiasDropoutAdd(1, Site.ATTENTION_OUTPUT)(True)((x, None), residual, 0.4)
        parts = [
            BiasDropoutAdd(1, Site.ATTENTION_OUTPUT, Split(0, rank, 4))(True)((a, None), r, 0.4)
            for rank, (a, r) in enumerate(zip(x.chunk(4), residual.chunk(4), strict=True))
        ]
    assert torch.equal(torch.cat(parts), whole)


def test_scopes_nest_and_belong_to_their_thread():
    other = DropoutKey(5, 5, (1,))
    seen = []
    assert current_key() is None
    with dropout_scope(KEY):
        with pytest.raises(ZeroDivisionError), dropout_scope(other):
            assert current_key() is other
            raise ZeroDivisionError
        assert current_key() is KEY
        thread = threading.Thread(target=lambda: seen.append(current_key()))
        thread.start()
        thread.join()
    assert current_key() is None and seen == [None]


def test_no_generator_is_advanced():
    before = torch.get_rng_state()
    with dropout_scope(KEY):
        sample_dropout(torch.ones(5, 3, 7), 0.5, **WHERE)
    assert torch.equal(before, torch.get_rng_state())


def test_the_module_holds_no_state_and_refuses_a_split_of_samples():
    assert not SampleDropout(0.1, unit=0, site=Site.EMBEDDING, sample_dim=1).state_dict()
    with pytest.raises(ValueError, match="cannot be split"):
        SampleDropout(0.1, unit=0, site=Site.EMBEDDING, sample_dim=1, split=Split(1, 0, 2))
