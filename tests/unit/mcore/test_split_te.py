"""Transformer Engine's layers leave their weight gradients in the queue of the piece that is deferring, and only then.

Transformer Engine needs a GPU. What runs here is a layer written after its ``Linear``: the store is asked at the
forward pass and again at the backward pass, and is handed operands and product. What it is asked is checked against
Transformer Engine's own sources where ELASTIC_WHEELS holds its wheel.
"""

from __future__ import annotations

import ast
from typing import Any

import pytest
import torch

from megatron.elastic.mcore.model.split_backward import SplitLinears
from megatron.elastic.mcore.model.split_te import QueueStore, split_te_linears
from tests.wheels import newest

SEED = 5


class Store:
    """A layer's own store, as it is when Megatron-LM does not ask for delayed weight gradients."""

    def delay_wgrad_compute(self) -> bool:
        return False


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, source: Any, weight: Any, bias: Any, store: Any) -> torch.Tensor:
        ctx.save_for_backward(source, weight)
        ctx.store, ctx.has_bias = store, bias is not None
        return torch.nn.functional.linear(source, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (gradient,) = gradients
        source, weight = ctx.saved_tensors

        def wgrad_gemm(x: torch.Tensor, dy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
            return dy.t() @ x, dy.sum(0) if ctx.has_bias else None

        weight_gradient = bias_gradient = None
        if ctx.store is not None and ctx.store.delay_wgrad_compute():
            ctx.store.put([source, gradient], wgrad_gemm)
        else:
            weight_gradient, bias_gradient = wgrad_gemm(source, gradient)
        return gradient @ weight, weight_gradient, bias_gradient, None


class Linear(torch.nn.Module):
    """The attributes that ``split_te`` reads, with the meaning they have in Transformer Engine."""

    fuse_wgrad_accumulation = False

    def __init__(self, inputs: int, outputs: int, bias: bool = True, names: tuple[str, ...] = ("weight",)) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(outputs, inputs))
        self.bias = torch.nn.Parameter(torch.randn(outputs)) if bias else torch.Tensor()
        self.use_bias, self.weight_names, self.wgrad_store = bias, list(names), Store()

    def forward(self, source: torch.Tensor) -> torch.Tensor:
        store = self.wgrad_store if self.wgrad_store.delay_wgrad_compute() else None
        return Product.apply(source, self.weight, self.bias if self.use_bias else None, store)


@pytest.fixture
def model() -> torch.nn.Module:
    torch.manual_seed(SEED)
    return torch.nn.Sequential(Linear(6, 8), torch.nn.GELU(), Linear(8, 4, bias=False))


def whole(model: torch.nn.Module, batches: list[torch.Tensor]) -> list[torch.Tensor]:
    """Gradients of the whole backward, batch after batch."""
    for batch in batches:
        model(batch).square().sum().backward()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def batches() -> list[torch.Tensor]:
    return list(torch.randn(3, 5, 6, generator=torch.Generator().manual_seed(SEED)))


def test_gradients_left_out_and_formed_later_have_the_bits_of_the_whole_backward(model: torch.nn.Module) -> None:
    expected = whole(model, batches())
    model.zero_grad(set_to_none=True)
    switch = SplitLinears()
    split_te_linears(model, switch)
    sums: dict[torch.nn.Parameter, torch.Tensor] = {}
    queues = []
    for batch in batches():
        with switch.deferring():
            loss = model(batch).square().sum()
        with switch.deferring() as queue:
            loss.backward()
        assert len(queue) == 2 and all(parameter.grad is None for parameter in model.parameters())
        queues.append(queue)
    for queue in queues:
        queue.run(lambda parameter, gradient: sums.update({parameter: sums.get(parameter, 0) + gradient}))
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        assert torch.equal(sums[parameter], gradient)


def test_a_backward_that_defers_nothing_is_whole(model: torch.nn.Module) -> None:
    """Also of a forward pass that could have been split."""
    expected = whole(model, batches()[:2])
    model.zero_grad(set_to_none=True)
    switch = SplitLinears()
    split_te_linears(model, switch)
    with switch.deferring():
        first = model(batches()[0]).square().sum()
    first.backward()
    model(batches()[1]).square().sum().backward()
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), expected, strict=True) if p.grad is not None)


def test_a_weight_that_takes_its_gradient_at_once_is_not_left_out(model: Any) -> None:
    switch = SplitLinears()
    split_te_linears(model, switch)
    first, second = model[0].weight, model[2].weight
    with switch.deferring([first]) as queue:
        model(batches()[0]).square().sum().backward()
    assert len(queue) == 1 and first.grad is not None and second.grad is None


@pytest.mark.parametrize(
    "change",
    [{"fuse_wgrad_accumulation": True}, {"ub_bulk_wgrad": True}, {"weight_names": ["query_weight", "key_weight"]}],
    ids=["adds into main_grad", "overlapped communication", "several weights"],
)
def test_layers_that_cannot_be_split_keep_their_store(change: dict[str, Any]) -> None:
    layer = Linear(4, 4)
    for name, value in change.items():
        setattr(layer, name, value)
    split_te_linears(layer, SplitLinears())
    assert isinstance(layer.wgrad_store, Store)


def test_a_store_that_is_never_emptied_takes_nothing() -> None:
    layer = Linear(4, 4)
    with pytest.raises(RuntimeError, match="no piece is deferring"):
        QueueStore(SplitLinears(), layer.weight, None).put([], lambda: ())


@pytest.fixture(scope="module")
def sources() -> dict[str, ast.Module]:
    with newest("transformer-engine") as archive:
        folder = "transformer_engine/pytorch/module"
        names = ("_common", "base", "linear", "layernorm_linear")
        return {name: ast.parse(archive.read(f"{folder}/{name}.py")) for name in names}


def test_what_transformer_engine_asks_of_a_store_is_there(sources: dict[str, ast.Module]) -> None:
    """Whatever its two layers call on the store outside of ``backward_dw``, with the store's own argument names."""
    called = {
        node.attr
        for name in ("linear", "layernorm_linear")
        for node in ast.walk(sources[name])
        if isinstance(node, ast.Attribute) and getattr(node.value, "attr", "") == "wgrad_store"
    }
    assert called and called <= {name for name in dir(QueueStore) if not name.startswith("_")}
    [store] = [n for n in sources["_common"].body if isinstance(n, ast.ClassDef) and n.name == "WeightGradStore"]
    [put] = [n for n in store.body if isinstance(n, ast.FunctionDef) and n.name == "put"]
    assert [argument.arg for argument in put.args.args] == ["self", "tensor_list", "func"]
    assert list(QueueStore.put.__annotations__) == ["tensor_list", "func", "return"]


def test_transformer_engines_layers_have_the_attributes_that_are_read(sources: dict[str, ast.Module]) -> None:
    for name in ("linear", "layernorm_linear"):
        assigned = {
            node.attr
            for source in (sources[name], sources["base"])
            for node in ast.walk(source)
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
        }
        assert {"wgrad_store", "weight_names", "fuse_wgrad_accumulation", "use_bias", "ub_bulk_wgrad"} <= assigned
        assert "ub_bulk_dgrad" in assigned and "ub_overlap_rs_dgrad" in assigned
