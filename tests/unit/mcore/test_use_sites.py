"""Each use of a shared weight has a gradient of its own; their sum is the gradient that autograd would have made."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.elastic.mcore.model.use_sites import own_use


@settings(deadline=None)
@given(seed=st.integers(0, 1 << 30), rows=st.integers(1, 5), size=st.integers(1, 6))
def test_the_gradients_of_both_ends_come_apart_and_add_up(seed: int, rows: int, size: int) -> None:
    random = torch.Generator().manual_seed(seed)
    weight = torch.nn.Parameter(torch.randn(size, size, generator=random))
    row = torch.randn(rows, size, generator=random)
    (row @ weight @ weight.t()).square().sum().backward()
    assert weight.grad is not None
    whole, weight.grad = weight.grad, None
    ends: tuple[list[torch.Tensor], list[torch.Tensor]] = [], []
    first, last = (own_use(weight, end.append) for end in ends)
    assert first.data_ptr() == last.data_ptr() == weight.data_ptr(), "no copy of the weight"
    (row @ first @ last.t()).square().sum().backward()
    assert weight.grad is None and [len(end) for end in ends] == [1, 1]
    torch.testing.assert_close(ends[0][0] + ends[1][0], whole, rtol=1e-4, atol=1e-4)


def test_each_gradient_has_the_bits_of_a_weight_used_once() -> None:
    weight, row = torch.nn.Parameter(torch.randn(4, 4)), torch.randn(3, 4)
    alone = weight.detach().clone().requires_grad_()
    (row @ alone @ weight.detach().t()).sum().backward()
    found: list[torch.Tensor] = []
    (row @ own_use(weight, found.append) @ own_use(weight, lambda _: None).t()).sum().backward()
    assert alone.grad is not None and torch.equal(found[0], alone.grad)
