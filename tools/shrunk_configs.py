"""Megatron-LM's functional-test configurations, made small enough for a few CPU cores.

A configuration is one ``model_config.yaml``: its ``MODEL_ARGS`` are the arguments of ``pretrain_gpt.py``. Parallel
sizes and features stay. What gets smaller is what costs time: widths, layers, sequence, samples, steps, and the
number of data-parallel replicas. What cannot be here is replaced: text and tokenizer by a small data set of random
tokens, folders by empty ones. Dropout is switched off, since its masks under ``--elastic`` are not plain Megatron's.
Two configurations that differ in nothing else have equal arguments then, and one run serves both.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

__all__ = ["FAMILIES", "STEPS", "Configuration", "Reference", "configurations", "ranks", "shrunk"]

FAMILIES = ("gpt", "moe")
CASES = Path("tests") / "functional_tests" / "test_cases"
STEPS = 6
MOST_RANKS = 8
HEADS, HEAD_WIDTH, SEQUENCE = 8, 8, 32
OTHER_SCRIPTS = {"inference": "inference", "grpo": "reinforcement learning (train_rl.py)"}
"""A part of a configuration's name → the work of a script other than pretrain_gpt.py."""


@dataclass(frozen=True)
class Configuration:
    """One functional test. ``given``: its flags and values, a switch has ``True``; empty if it trains nothing."""

    name: str
    kind: str
    given: Mapping[str, Any]

    @property
    def other_script(self) -> str:
        """The work of the configuration's script if that is not ``pretrain_gpt.py``, else empty."""
        return next((work for part, work in OTHER_SCRIPTS.items() if part in self.name), "")

    def number(self, flag: str, default: int = 1) -> int:
        return int(self.given.get(flag, default))


def configurations(checkout: Path) -> tuple[Configuration, ...]:
    """Read every configuration of :data:`FAMILIES` in a checkout of Megatron-LM, by name."""
    found = []
    for family in FAMILIES:
        for path in sorted((checkout / CASES / family).glob("*/model_config.yaml")):
            read = yaml.safe_load(path.read_text(encoding="utf-8"))
            given = read.get("MODEL_ARGS") or {}
            found.append(Configuration(f"{family}/{path.parent.name}", read.get("TEST_TYPE") or "", given))
    return tuple(found)


# ---------------------------------------------------------------- sizes

_ABSENT = frozenset(
    (
        *("--data-path", "--data-cache-path", "--vocab-file", "--merge-file", "--tokenizer-model", "--tokenizer-type"),
        *("--vocab-size", "--mock-data", "--load", "--wandb-project", "--wandb-entity", "--wandb-exp-name"),
        *("--wandb-save-dir", "--exit-interval", "--exit-duration-in-mins", "--attention-dropout", "--hidden-dropout"),
        *("--train-samples", "--lr-decay-samples", "--distributed-timeout-minutes", "--export-kd-teacher-load"),
        "--num-workers",
    )
)
"""Flags that name what is not here, or how long a run of other sizes lasts."""

_SIZES: Mapping[str, Callable[[Configuration], str]] = {
    "--hidden-size": lambda case: str(HEADS * HEAD_WIDTH),
    "--ffn-hidden-size": lambda case: "128",
    "--num-attention-heads": lambda case: str(HEADS),
    "--kv-channels": lambda case: str(HEAD_WIDTH),
    "--num-layers": lambda case: str(_layers(case)),
    "--num-layers-per-virtual-pipeline-stage": lambda case: "1",
    "--seq-length": lambda case: str(SEQUENCE),
    "--max-position-embeddings": lambda case: str(SEQUENCE),
    "--num-experts": lambda case: str(min(case.number("--num-experts"), 8)),
    "--moe-ffn-hidden-size": lambda case: "32",
    "--moe-shared-expert-intermediate-size": lambda case: "32",
    "--q-lora-rank": lambda case: "16",
    "--kv-lora-rank": lambda case: "12",
    "--qk-head-dim": lambda case: "8",
    "--qk-pos-emb-head-dim": lambda case: "4",
    "--v-head-dim": lambda case: "6",
    "--mup-base-hidden-size": lambda case: "32",
    "--linear-key-head-dim": lambda case: "8",
    "--linear-value-head-dim": lambda case: "8",
    "--micro-batch-size": lambda case: str(_micro_batch(case)),
    "--global-batch-size": lambda case: str(_batch(case)),
    "--rampup-batch-size": lambda case: f"[{_batch(case) // 2} {_batch(case) // 2} {_batch(case) * 2}]",
    "--train-iters": lambda case: str(STEPS),
    "--lr-decay-iters": lambda case: "20",
    "--lr-warmup-samples": lambda case: str(min(case.number("--lr-warmup-samples"), 2 * _batch(case))),
    "--microbatch-group-size-per-virtual-pipeline-stage": lambda case: str(
        min(case.number("--microbatch-group-size-per-virtual-pipeline-stage"), _micro_batches(case))
    ),
    "--save-interval": lambda case: str(STEPS - 2),
    "--save-retain-interval": lambda case: str(STEPS - 2),
    "--eval-iters": lambda case: str(min(case.number("--eval-iters"), 1)),
    "--log-interval": lambda case: "1",
    "--check-weight-hash-across-dp-replicas-interval": lambda case: "2",
}
"""Flag → its value at CPU size; used only where a configuration has the flag."""


def _cell(case: Configuration) -> int:
    """Ranks of one data-parallel replica."""
    return math.prod(
        case.number(flag)
        for flag in ("--tensor-model-parallel-size", "--pipeline-model-parallel-size", "--context-parallel-size")
    )


def ranks(case: Configuration) -> int:
    """Return the number of ranks: two data-parallel replicas or as many as the experts need, at most 8."""
    stages = case.number("--pipeline-model-parallel-size")
    tensor = case.number("--tensor-model-parallel-size")
    sharing = case.number("--expert-model-parallel-size") * case.number("--expert-tensor-parallel-size", tensor)
    replicas = max(_cell(case), stages * sharing) * case.number("--num-distributed-optimizer-instances")
    return min(MOST_RANKS, max(2 * _cell(case), replicas))


def _replicas(case: Configuration) -> int:
    return max(1, ranks(case) // _cell(case))


def _layers(case: Configuration) -> int:
    """Return the fewest layers with the same stages and chunks; those of a configuration that names layers stay."""
    layers = case.number("--num-layers")
    named = ("--pipeline-model-parallel-layout", "--moe-layer-freq", "--linear-attention-freq")
    if any(flag in case.given for flag in named) or any("pipeline-num-layers" in flag for flag in case.given):
        return layers
    stages = case.number("--pipeline-model-parallel-size")
    if "--account-for-loss-in-pipeline-split" in case.given:
        return layers
    by_size = "--num-layers-per-virtual-pipeline-stage"
    chunks = case.number("--num-virtual-stages-per-pipeline-rank")
    if by_size in case.given:
        chunks = layers // stages // case.number(by_size)
    return max(2, stages * chunks)


def _micro_batch(case: Configuration) -> int:
    return min(case.number("--micro-batch-size"), 2)


def _micro_batches(case: Configuration) -> int:
    """Micro-batches of a replica: twice the stages, so that a pipeline is full, and a batch can begin at half."""
    return 2 * case.number("--pipeline-model-parallel-size")


def _batch(case: Configuration) -> int:
    return _micro_batch(case) * _replicas(case) * _micro_batches(case)


# ---------------------------------------------------------------- arguments


def shrunk(case: Configuration, folder: str, data: str, without: Collection[str] = ()) -> list[str]:
    """Return the arguments of ``pretrain_gpt.py`` for ``case`` at CPU size.

    ``folder``: for what the run writes. ``data``: prefix of a data set of tokens below 255. ``without``: flags to leave
    out.
    """
    words = []
    for flag, value in case.given.items():
        if flag in _ABSENT or flag in without:
            continue
        size = _SIZES.get(flag)
        words += _words(flag, value if size is None else size(case), folder)
    words += ["--data-path", data, "--data-cache-path", f"{folder}/cache", "--tokenizer-type", "NullTokenizer"]
    words += ["--vocab-size", "255", "--attention-dropout", "0", "--hidden-dropout", "0", "--num-workers", "0"]
    if "--train-iters" not in case.given:
        words += ["--train-samples", str(STEPS * _batch(case)), "--lr-decay-samples", str(20 * _batch(case))]
    if "--micro-batch-size" not in case.given:
        words += ["--micro-batch-size", str(_micro_batch(case))]
    if "--fp16" in case.given and "--initial-loss-scale" not in case.given:
        words += ["--initial-loss-scale", "1024"]  # with Megatron's default, all of a few steps are skipped
    return words


def _words(flag: str, value: Any, folder: str) -> list[str]:
    """Return a flag's words as Megatron-LM's own test script builds them: lists lose their brackets."""
    text = re.sub(r"\$\{?\w+\}?", folder, str(value).strip().replace("${REPEAT}", "1"))
    if value is True or text == "true":
        return [flag]
    if flag in ("--save", "--tensorboard-dir"):
        text = f"{folder}/{flag[2:]}"
    listed = re.fullmatch(r"\[([^()]*)\]|([\d ]+)", text)
    return [flag, *(text.strip("[]").split() if listed else [text])]


# ---------------------------------------------------------------- plain Megatron

_SAVING = (
    *("--save", "--save-interval", "--save-retain-interval", "--async-save", "--async-strategy", "--ckpt-format"),
    *("--use-persistent-ckpt-worker", "--ckpt-assume-constant-structure", "--ckpt-fully-parallel-save"),
    *("--no-ckpt-fully-parallel-save", "--dist-ckpt-optim-fully-reshardable", "--verify-integrity"),
)
_READING = (
    *("--dist-ckpt-strictness", "--auto-detect-ckpt-format", "--ckpt-fully-parallel-load", "--use-checkpoint-args"),
    *("--use-checkpoint-opt_param-scheduler", "--no-use-tokenizer-model-from-checkpoint-args", "--no-load-optim"),
)
_CONTEXT = ("--context-parallel-size", "--cp-comm-type", "--hierarchical-context-parallel-sizes")
_EXPERTS = ("--expert-model-parallel-size", "--expert-tensor-parallel-size")


@dataclass(frozen=True)
class Reference:
    """The run of plain Megatron that has the losses of a configuration and that a CPU can do.

    It writes no checkpoints and no summaries, and injects no errors of its own. Without Transformer Engine it has no
    context parallelism: fewer ranks have the whole sequence then, and all experts. gloo gathers equal tensors only, so
    experts that ranks cut between them gather all tokens, not their own. No loss depends on any of these.
    """

    ranks: int
    without: tuple[str, ...]
    """The flags that it leaves out."""
    begins: bool
    """True if both runs must begin with weights from one checkpoint: Megatron draws others on other ranks."""

    @classmethod
    def of(cls, case: Configuration) -> Reference:
        """Return the reference of ``case``."""
        parts = case.number("--context-parallel-size")
        without = [*_SAVING, *_READING, "--tensorboard-dir", "--error-injection-rate", "--error-injection-type"]
        if parts > 1:
            without += (*_CONTEXT, *_EXPERTS)
        if case.number("--expert-tensor-parallel-size", case.number("--tensor-model-parallel-size")) > 1:
            without.append("--moe-token-dispatcher-type")  # allgather is Megatron's default
        return cls(ranks(case) // parts, tuple(without), parts > 1)
