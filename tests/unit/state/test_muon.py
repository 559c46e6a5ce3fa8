"""Muon's step is that of emerging-optimizers, its blocks hold whole matrices, and a pool steps each by its kind."""

from __future__ import annotations

import importlib
import typing
from pathlib import Path
from typing import Any

import pytest
import torch
import typing_extensions
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.elastic.state.adam import LionScalars, lion_step
from megatron.elastic.state.layout import ALIGN, Matrix, ParamSpec, UnitLayout
from megatron.elastic.state.lion import Lion
from megatron.elastic.state.muon import COEFFICIENTS, Muon
from megatron.elastic.state.muon_step import MuonScalars, muon_step, orthogonalize
from megatron.elastic.state.pool import StatePool
from megatron.elastic.state.record import ConstantSchedule, GradientKey, Hyper, Rate, StepRecord, Vote, advance
from tests.emerging import unpacked

STEPS, LR, DECAY, SCALE = 4, 0.02, 0.1, 0.25
SHAPES = ((24, 24), (7, 40), (40, 7), (33, 1), (1, 5))
CASES = (
    *(Muon(coefficients=name, precision="high") for name in COEFFICIENTS),
    Muon(nesterov=True, precision="high"),
    Muon(0.95, True, "shape_scaling", iterations=7, extra_scale=0.2, precision="high"),
    Muon(0.95, True, "unit_rms_norm", "polar_express", 10, precision="high"),
    Muon(nesterov=True),
)


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The optimizers of the package."""
    monkeypatch.setattr(typing, "override", typing_extensions.override, raising=False)
    monkeypatch.syspath_prepend(str(unpacked(tmp_path)))
    return importlib.import_module("emerging_optimizers.orthogonalized_optimizers")


def theirs(package: Any, muon: Muon, start: torch.Tensor, gradients: list[torch.Tensor]) -> tuple[torch.Tensor, Any]:
    """Weight and momentum after the package's steps."""
    weight = torch.nn.Parameter(start.clone())
    optimizer = package.Muon(
        [weight],
        LR,
        muon.momentum,
        DECAY,
        nesterov=muon.nesterov,
        fp32_matmul_prec=muon.precision,
        coefficient_type=muon.coefficients,
        num_ns_steps=muon.iterations,
        scale_mode=muon.scale,
        extra_scale_factor=muon.extra_scale,
    )
    for gradient in gradients:
        weight.grad = gradient * SCALE
        optimizer.step()
    return weight.detach(), optimizer.state[weight]["momentum_buffer"]


def ours(muon: Muon, matrix: Matrix, start: torch.Tensor, gradients: list[torch.Tensor]) -> list[torch.Tensor]:
    """Weight and momentum after our steps, in memory that is padded behind the matrix."""
    weight, momentum = torch.zeros(2, matrix.numel + ALIGN)
    weight[: matrix.numel] = start.flatten()
    for gradient in gradients:
        padded = torch.cat([gradient.flatten(), torch.zeros(ALIGN)])
        muon_step(weight, momentum, padded, matrix, MuonScalars(SCALE, LR, DECAY, muon))
    assert not weight[matrix.numel :].any() and not momentum[matrix.numel :].any()
    return [flat[: matrix.numel].view(matrix.rows, matrix.columns) for flat in (weight, momentum)]


def trial(rows: int, columns: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
    made = torch.Generator().manual_seed(rows * 100 + columns)
    return torch.randn(rows, columns, generator=made), list(torch.randn(STEPS, rows, columns, generator=made))


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm())


@pytest.mark.parametrize("muon", CASES, ids=lambda m: f"{m.coefficients}-{m.scale}-{m.nesterov}-{m.precision}")
def test_the_step_is_that_of_the_package(package: Any, muon: Muon) -> None:
    allowed = 1e-5 if muon.precision == "high" else 1e-3
    for shape in SHAPES:
        start, gradients = trial(*shape)
        for mine, other in zip(
            ours(muon, Matrix(*shape), start, gradients), theirs(package, muon, start, gradients), strict=True
        ):
            assert distance(mine, other) < allowed, shape


def test_queries_keys_and_values_are_stepped_apart_as_matrices_of_their_own(package: Any) -> None:
    """Three groups of four rows of queries, two of keys and two of values; the package steps three matrices."""
    parts, muon = (4, 2, 2), Muon(nesterov=True, precision="high")
    start, gradients = trial(24, 10)
    weight, momentum = ours(muon, Matrix(24, 10, parts), start, gradients)
    for first, size in ((0, 4), (4, 2), (6, 2)):
        rows = [group * 8 + first + at for group in range(3) for at in range(size)]
        other = theirs(package, muon, start[rows], [gradient[rows] for gradient in gradients])
        assert distance(weight[rows], other[0]) < 1e-5 and distance(momentum[rows], other[1]) < 1e-5


@pytest.mark.parametrize("shape", [(12, 12), (5, 30), (30, 5)])
def test_an_orthogonalized_matrix_has_singular_values_of_one(shape: tuple[int, int]) -> None:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(3))
    singular = torch.linalg.svdvals(
        orthogonalize(values, Muon(coefficients="polar_express", iterations=14, precision="high"))
    )
    assert float((singular - 1).abs().max()) < 1e-3
    assert not orthogonalize(torch.zeros(shape), Muon()).any()


def test_settings_that_megatron_or_torch_do_not_know_are_refused_by_flag() -> None:
    for given_, flag in (
        ({"coefficients": "cubic"}, "--muon-coefficient-type cubic"),
        ({"iterations": 0}, "--muon-num-ns-steps 0"),
        ({"precision": "low"}, "--muon-fp32-matmul-prec low"),
        ({"scale": "none"}, "--muon-scale-mode none"),
    ):
        with pytest.raises(ValueError, match=flag) as caught:
            Muon(**given_)  # type: ignore[arg-type]
        assert ": use " in str(caught.value)


SPECS = st.lists(
    st.tuples(st.integers(1, 40), st.integers(1, 40), st.booleans(), st.booleans()), min_size=1, max_size=10
)


@given(SPECS, st.integers(1, 60).map(lambda quanta: quanta * 64))
def test_a_matrix_is_one_block_alone_and_other_parameters_are_cut_at_the_limit(raw: Any, block_bytes: int) -> None:
    specs = [
        ParamSpec(f"p{i}", m * n, (m, n), sharded, matrix=Matrix(m, n) if muon else None)
        for i, (m, n, sharded, muon) in enumerate(raw)
    ]
    layout = UnitLayout.build(2, 0, specs, block_bytes)
    edges = [0, *[block.stop for block in layout.blocks]]
    assert [block.start for block in layout.blocks] == edges[:-1] and edges[-1] == layout.numel
    for block in layout.blocks:
        inside = layout.params_in(block)
        matrices = [slot for slot in inside if slot.spec.matrix is not None]
        assert [run.matrix for run in layout.runs(block) if run.matrix] == [slot.spec.matrix for slot in matrices]
        if matrices:
            assert len(inside) == 1 and (block.start, block.numel - inside[0].spec.numel < ALIGN) == (
                inside[0].start,
                True,
            )
        else:
            assert 0 < block.numel * 4 <= block_bytes
    assert sorted(slot.spec.name for slot in layout.slots) == sorted(spec.name for spec in specs)


@settings(max_examples=20, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 20), st.integers(1, 20)), min_size=1, max_size=4),
    st.integers(0, 9),
    st.sampled_from([Muon(nesterov=True), Lion(0.9, 0.99)]),
)
def test_a_pool_steps_matrices_by_muon_or_lion_and_the_others_by_adam(
    shapes: list[tuple[int, int]], seed: int, by: Muon | Lion
) -> None:
    matrices = [ParamSpec(f"w{i}", m * n, (m, n), True, matrix=Matrix(m, n)) for i, (m, n) in enumerate(shapes)]
    specs = [ParamSpec("bias", 50, (50,), True, 0.0), *matrices, ParamSpec("norm", 9, (9,), False, 0.0)]
    layout, rates = UnitLayout.build(0, 0, specs, 128), (Rate(LR, DECAY),)
    start, gradient = torch.randn(2, layout.numel, generator=torch.Generator().manual_seed(seed))
    hyper, key = Hyper(ConstantSchedule(rates), matrices=by), GradientKey(0, 1)
    pool, record = StatePool(0, {(0, 0): layout}, hyper, snapshot="state"), StepRecord.initial(hyper)
    pool.start(record)
    for block in layout.blocks:
        pool.put(block.key, start[block.start : block.stop], 0)
        pool.retain(block.key, key, gradient[block.start : block.stop])
    after = advance(record, Vote(key, [1.0], False, 4.0, 4.0, 8, rates=rates), pool.hyper)
    pool.apply(after)
    flat = torch.cat([pool.get(block.key).state for block in layout.blocks], dim=1)
    for slot in layout.slots:
        part = slice(slot.start, slot.stop)
        weight, momentum = start[part].clone(), torch.zeros(slot.spec.numel)
        if slot.spec.matrix is None:
            assert flat[2, part].all(), "Adam has a second moment"
            continue
        if isinstance(by, Lion):
            lion_step(weight, momentum, gradient[part], LionScalars(after.grad_multiplier, LR, DECAY, by))
        else:
            scalars = MuonScalars(after.grad_multiplier, LR, DECAY, by)
            muon_step(weight, momentum, gradient[part], slot.spec.matrix, scalars)
        assert torch.equal(flat[0, part], weight) and torch.equal(flat[1, part], momentum)
        assert not flat[2, part].any()
