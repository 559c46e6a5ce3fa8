"""With --elastic and nothing failing, losses and gradient norms are Megatron's own, to fp32 rounding.

The same flags run under plain Megatron-LM (``torchrun``'s environment, its DDP,
its schedules, its Adam) and under the engine; dropout 0. Four cases are quick and read
the log's digits; the slow matrix reads all digits of both (Megatron's from its
TensorBoard log) over real documents whose ends are masked, so that micro-batches
have between half and all of their tokens.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from tests.integration.elastic_job import MODEL, JobResult, elastic_job, largest_deviation
from tests.integration.test_cpu_layouts import LAYOUTS, gradient_norms, logs, losses, name_of, run_jobs

STEPS = 5
ROUNDING = 2e-6
NO_DROPOUT = ("--hidden-dropout", "0", "--attention-dropout", "0")
UNTIED = ("--untie-embeddings-and-output-weights",)
RECOMPUTE = ("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1")
PER_TOKEN = ("--calculate-per-token-loss",)
CHUNKS = ("--num-virtual-stages-per-pipeline-rank", "2")
EXPERTS = ("--num-experts", "4", "--moe-aux-loss-coeff", "0.01", "--moe-z-loss-coeff", "1e-3", "--disable-bias-linear")
WIDTH = ("--use-mup", "--mup-base-hidden-size", "16", "--adam-eps", "1e-3")
"""Of gradients so small that the epsilon matters."""
SHARED = ("--expert-model-parallel-size", "2", "--moe-token-dispatcher-type", "alltoall")
"""Two ranks have half of the experts each."""


@dataclass(frozen=True)
class Case:
    """Flags of one run at (tp, pp, dp), and its name."""

    name: str
    layout: tuple[int, int, int]
    flags: tuple[str, ...] = ()

    @property
    def ranks(self) -> int:
        tensor, pipeline, data = self.layout
        return tensor * pipeline * data

    def elastic(self, folder: Path, model: Sequence[str] = MODEL) -> JobResult:
        """Under the engine; events go to ``folder``."""
        tensor, pipeline, _ = self.layout
        flags = (*NO_DROPOUT, *self.flags)
        result = elastic_job(folder, self.ranks, tensor, pipeline, STEPS, *flags, model=model)
        assert result.code == 0, result.output[-6000:]
        return result


def run_plain(folder: Path, cases: Sequence[Case], model: Sequence[str] = MODEL) -> None:
    """Every case under plain Megatron; logs go to ``folder``, TensorBoard's to ``folder/<name>-board``."""
    jobs = [
        {
            "name": case.name,
            "world": case.ranks,
            "seconds": 240,
            "arguments": [
                *model,
                *NO_DROPOUT,
                "--train-iters",
                str(STEPS),
                *case.flags,
                "--tensor-model-parallel-size",
                str(case.layout[0]),
                "--pipeline-model-parallel-size",
                str(case.layout[1]),
                "--tensorboard-dir",
                str(folder / f"{case.name}-board"),
            ],
        }
        for case in cases
    ]
    codes = run_jobs(folder, jobs)
    assert all(set(ranks) == {0} for ranks in codes.values()), codes


QUICK = (
    Case("pp2dp2-untied-recompute-clip", (1, 2, 2), (*UNTIED, *RECOMPUTE, "--clip-grad", "0.5", "--eod-mask-loss")),
    Case("dp4-tied", (1, 1, 4)),
    Case("pp2-interleaved", (1, 2, 1), CHUNKS),
    Case("tp2dp2-experts", (2, 1, 2), (*EXPERTS, "--sequence-parallel")),
)
FURTHER = (
    Case("tp2pp2-per-token-uneven-masks", (2, 2, 1), (*PER_TOKEN, "--eod-mask-loss", "--sequence-parallel")),
    Case("pp2dp2-experts-shared", (1, 2, 2), (*EXPERTS, *SHARED)),
    Case("pp2dp2-width", (1, 2, 2), (*UNTIED, *WIDTH)),
    Case("tp2dp2-learnable-sinks", (2, 1, 2), ("--softmax-type", "learnable")),
    Case("pp2dp2-experts-per-token", (1, 2, 2), (*EXPERTS, *PER_TOKEN, "--eod-mask-loss")),
)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Logs of the quick cases under plain Megatron."""
    folder = tmp_path_factory.mktemp("plain")
    run_plain(folder, QUICK)
    return folder


def compare(plain: Path, tmp_path: Path, case: Case) -> None:
    result = case.elastic(tmp_path)
    reference = losses(logs(plain, case.name))
    assert len(reference) == STEPS
    assert largest_deviation(reference, result.losses) < ROUNDING
    theirs, ours = gradient_norms(logs(plain, case.name)), list(result.norms.values())
    assert all(abs(float(a) - b) <= 1.01e-3 for a, b in zip(theirs, ours, strict=True)), (theirs, ours)
    assert balancing(result.output) == pytest.approx(balancing(logs(plain, case.name)), rel=ROUNDING)


@pytest.mark.parametrize("case", QUICK, ids=lambda case: case.name)
def test_losses_and_norms_are_megatrons(plain: Path, tmp_path: Path, case: Case) -> None:
    compare(plain, tmp_path, case)


@pytest.mark.slow
@pytest.mark.parametrize("case", FURTHER, ids=lambda case: case.name)
def test_losses_and_norms_are_megatrons_with_further_flags(tmp_path: Path, case: Case) -> None:
    run_plain(tmp_path, [case])
    compare(tmp_path, tmp_path / "elastic", case)


def balancing(text: str) -> list[float]:
    """The loss that balances experts, by step; Megatron's z-loss is that of one rank alone."""
    return [float(loss) for loss in re.findall(r"load_balancing_loss: (\S+)", text)]


# -- every layout, both meanings of a loss ------------------------------------------------------

CLIP = 0.2
"""Below every norm that occurs: each step is clipped."""
NORM_ROUNDING = 1e-5


def matrix(layout: tuple[int, int, int], number: int) -> tuple[Case, Case]:
    """Mean and per-token loss at ``layout``, one of them untied, the other with recomputation, by turns.

    So tied and untied embeddings, recomputation and its absence meet each of TP, PP and DP with either loss.
    """
    sequence = ("--sequence-parallel",) if layout[0] > 1 else ()
    kinds = ((*UNTIED, *sequence), RECOMPUTE)
    first, second = kinds if number % 2 else kinds[::-1]
    name = name_of(layout)
    return Case(f"{name}-mean", layout, first), Case(f"{name}-per-token", layout, (*PER_TOKEN, *second))


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """The model reading random documents, as many tokens in ones of three as in ones of a hundred, clipped."""
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    folder, dice = tmp_path_factory.mktemp("documents"), np.random.default_rng(7)
    builder = IndexedDatasetBuilder(str(folder / "text.bin"), dtype=np.uint16)
    end = 255  # NullTokenizer's, with --vocab-size 255
    for length in dice.permutation([3] * 1000 + [100] * 30):
        tokens = [*dice.integers(0, end, length - 1), end]
        builder.add_document(np.array(tokens, dtype=np.uint16), [length])
    builder.finalize(str(folder / "text.idx"))
    data = ("--data-path", str(folder / "text"), "--data-cache-path", str(folder / "cache"), "--eod-mask-loss")
    return (*(flag for flag in MODEL if flag != "--mock-data"), *data, "--split", "100,0,0", "--clip-grad", str(CLIP))


def scalars(folder: Path, tag: str) -> dict[int, float]:
    """Step → value, from a TensorBoard log."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (path,) = folder.glob("events.out.tfevents.*")
    log = EventAccumulator(str(path))
    log.Reload()
    return {event.step: event.value for event in log.Scalars(tag)}


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(LAYOUTS)), ids=[name_of(layout) for layout in LAYOUTS])
def test_every_layout_with_both_losses(tmp_path: Path, documents: tuple[str, ...], number: int) -> None:
    same_to_all_digits(tmp_path, matrix(LAYOUTS[number], number), documents)


INTERLEAVED = (
    Case("pp2dp2-interleaved", (1, 2, 2), CHUNKS),
    Case(
        "tp2pp2-interleaved",
        (2, 2, 1),
        (*PER_TOKEN, *UNTIED, "--sequence-parallel", "--num-layers-per-virtual-pipeline-stage", "1"),
    ),
    Case("pp4-interleaved", (1, 4, 1), (*RECOMPUTE, *CHUNKS, "--num-layers", "8")),
    Case("pp2dp2-three-chunks", (1, 2, 2), ("--pipeline-model-parallel-layout", "E|t|t|t|t|L")),
)


@pytest.mark.slow
@pytest.mark.parametrize("case", INTERLEAVED, ids=lambda case: case.name)
def test_interleaved_schedules(tmp_path: Path, documents: tuple[str, ...], case: Case) -> None:
    """Megatron's own, with as many model chunks a stage, also three of which one is an end of the model alone."""
    same_to_all_digits(tmp_path, (case,), documents)


def same_to_all_digits(folder: Path, cases: Sequence[Case], documents: Sequence[str]) -> None:
    """Losses and gradient norms of plain Megatron and of the engine."""
    run_plain(folder, cases, documents)
    for case in cases:
        result = case.elastic(folder / case.name, documents)
        board = folder / f"{case.name}-board"
        loss, norm = scalars(board, "lm loss"), scalars(board, "grad-norm")
        norms = {record.fields["step"]: float(record.fields["grad_norm"]) for record in result.of("step")}
        assert set(loss) == set(norm) == set(result.committed) == set(range(1, STEPS + 1))
        assert min(norm.values()) > CLIP, "every step is clipped"
        losses_by, norms_by = largest_deviation(loss, result.committed), largest_deviation(norm, norms)
        assert losses_by < ROUNDING, (case.name, loss, result.committed)
        assert norms_by < NORM_ROUNDING, (case.name, norm, norms)
        print(f"{case.name}: losses deviate by {losses_by:.1e}, gradient norms by {norms_by:.1e}")
