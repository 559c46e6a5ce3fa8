"""The sections of a proof. Each runs jobs and returns its figures, with ``passed`` and, if not, ``fault``.

Losses are compared from one checkpoint of plain Megatron on one device: devices draw other initial values in each
stage. Dropout is off, since plain Megatron draws its masks in the order of calls.
"""

from __future__ import annotations

import json
import re
import shlex
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from megatron.elastic.engine.inject import STEP_POINTS
from megatron.elastic.observe.events import EventRecord
from tools.bench._jobs import ROOT
from tools.proof.machine import Machine, Ran

__all__ = ["SECTIONS", "Figures", "Settings"]

Figures = dict[str, Any]

MODEL = shlex.split("""
    --num-layers 4 --hidden-size 128 --num-attention-heads 4 --seq-length 128 --max-position-embeddings 128
    --micro-batch-size 2 --global-batch-size 16 --vocab-size 1023 --hidden-dropout 0 --attention-dropout 0
    --lr-decay-iters 400 --ckpt-format torch_dist
""")
SAVED = 2
"""The step of the checkpoint."""
ROUNDING = 1e-5
"""Relative, of a loss in fp32: sums are added in another order."""
ROUNDING_FP8 = 2e-3
"""Relative, of a loss in bf16 and FP8: a sum in another order may round to the next one of few numbers."""
MANY = 4000
LAYOUTS = ((1, 1, 1), (2, 1, 1), (2, 2, 1), (2, 1, 2), (4, 1, 2), (4, 2, 1))
"""(ranks, tensor-parallel size, stages)."""
FIXED_ORDER = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NCCL_ALGO": "Ring"}
"""Variables with which ``--deterministic-mode`` starts on NVIDIA GPUs."""
GIB = 1 << 30


@dataclass(frozen=True)
class Settings:
    """The amount of work of a proof."""

    points: tuple[str, ...] = (*STEP_POINTS, "between_steps")
    layouts: tuple[tuple[int, int, int], ...] = LAYOUTS
    steps: int = 6
    timed_steps: int = 40
    trials: int = 3
    state_bytes: int = GIB
    """Of a rank, in the rejoin."""
    recipes: tuple[str, ...] = ("delayed", "tensorwise")
    """Of FP8."""
    plain_alone: bool = False
    """Plain Megatron has no library for several of these devices."""

    @classmethod
    def short(cls) -> Settings:
        """One case of each kind, for a machine whose speed does not matter."""
        return cls(("after_reduce",), ((2, 1, 1),), 4, 6, 1, 1 << 22, ("delayed",))


def sizes(tensor: int, pipeline: int) -> tuple[str, ...]:
    """Flags of a layout."""
    return (
        "--tensor-model-parallel-size",
        str(tensor),
        "--pipeline-model-parallel-size",
        str(pipeline),
    )


def ending(step: int) -> tuple[str, ...]:
    """Flags of a job that ends after ``step``; a checkpoint's learning rate goes by the steps that were planned."""
    return ("--train-iters", str(MANY), "--exit-interval", str(step))


def from_checkpoint(saved: Path) -> tuple[str, ...]:
    """Flags to go on from the checkpoint in ``saved``. A generator's state belongs to a layout."""
    return ("--load", str(saved), "--ckpt-step", str(SAVED), "--no-load-rng")


def faults(script: Iterable[str]) -> tuple[str, ...]:
    """Flags for a fault script."""
    return ("--elastic-allow-inject", "--elastic-inject", ";".join(script))


def failed(*runs: Ran) -> str:
    """The faults of jobs that failed."""
    return "\n".join(run.fault for run in runs if run.fault)


def deviation(reference: Mapping[int, float], other: Mapping[int, float]) -> float:
    """The largest relative difference of a loss after the checkpoint; infinite if a step of ``other`` is missing."""
    steps = sorted(step for step in other if step > SAVED)
    if not steps or steps != list(range(SAVED + 1, max(steps) + 1)):
        return float("inf")
    return max(abs(other[step] / reference[step] - 1) if step in reference else float("inf") for step in steps)


# -- what the device is ------------------------------------------------------------------------


def device(machine: Machine, settings: Settings) -> Figures:
    """The device, and its vendor's library in a group of one."""
    found = _told(machine, "tools.proof.device")
    library = found.get("library", {})
    return {"passed": not found.get("fault") and not library.get("fault") and library.get("right", True), **found}


def kernels(machine: Machine, settings: Settings) -> Figures:
    """The device's kernels: whether optimizers and dropout have the host's bits, and the time of a step of Adam."""
    found = _told(machine, "tools.proof.kernels")
    masks = found.get("dropout", {})
    passed = not found.get("fault") and not found["differing"] and masks["equal"] == masks["cases"]
    return {"passed": passed, **found}


def _told(machine: Machine, module: str) -> Figures:
    """Return what a program says of the first device in its last line, or its fault."""
    done = subprocess.run(
        [sys.executable, "-m", module],
        cwd=ROOT,
        env=machine.environment(),
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    if done.returncode:
        return {"fault": done.stderr[-2000:]}
    found: Figures = json.loads(done.stdout.splitlines()[-1])
    return found


# -- parity and layouts ------------------------------------------------------------------------


def parity(machine: Machine, settings: Settings) -> Figures:
    """Every layout against plain Megatron on one device, from its checkpoint, with ranks sharing a device and not."""
    save = ("--save", str(machine.folder / "saved"), "--save-interval", str(SAVED))
    first = machine.job("saving", 1, *MODEL, *ending(SAVED), *save, elastic=False, one_device=True)
    ends = ending(settings.steps)
    plain = machine.job(
        "plain", 1, *MODEL, *ends, *from_checkpoint(machine.folder / "saved"), elastic=False, one_device=True
    )
    if fault := failed(first, plain):
        return {"passed": False, "fault": fault}

    def layout(ranks: int, tensor: int, pipeline: int, one_device: bool) -> Figures:
        name = f"layout-{ranks}-{tensor}-{pipeline}-{'shared' if one_device else 'own'}"
        flags = (*MODEL, *ends, *from_checkpoint(machine.folder / "saved"), *sizes(tensor, pipeline))
        run = machine.job(name, ranks, *flags, one_device=one_device)
        row = {"ranks": ranks, "tensor": tensor, "pipeline": pipeline, "one_device": one_device}
        return {**row, "deviation": deviation(plain.losses, run.losses), "fault": failed(run)}

    apart = [one for one in settings.layouts if machine.devices >= max(2, one[0])]
    shared = [partial(layout, *one, one_device=True) for one in settings.layouts]
    own = [partial(layout, *one, one_device=False) for one in apart]
    rows = machine.side_by_side([*shared, *own])
    worst = max(row["deviation"] for row in rows)
    return {"passed": worst <= ROUNDING, "deviation": worst, "layouts": rows}


# -- losses of ranks ---------------------------------------------------------------------------


def kills(machine: Machine, settings: Settings) -> Figures:
    """A kill at each named point of a step (PP 2 × DP 2), each rank back before the next; MTTR with its phases."""
    script = ["delay:missing=1,count=0,point=before_step,seconds=0.3"]
    for number, point in enumerate(settings.points):
        wait = ",wait=1" if number == 0 else ""
        script.append(f"kill:rank={number % 4},losses={number},point={point}{wait}")
    flags = (
        *MODEL,
        *sizes(1, 2),
        *from_checkpoint(machine.folder / "saved"),
        *faults(script),
        "--elastic-mirrors",
        "2",
    )
    count, seconds = len(settings.points), 60.0 + 45.0 * len(settings.points)
    until = whole_again(count)
    run = machine.job("kills", 4, *flags, "--train-iters", str(MANY), seconds=seconds, until=until)
    if not run.losses:
        return {"passed": False, "fault": failed(run) or "no step was committed"}
    last = ending(max(run.losses))
    plain = machine.job(
        "kills-plain",
        1,
        *MODEL,
        *from_checkpoint(machine.folder / "saved"),
        *last,
        elastic=False,
        one_device=True,
        seconds=seconds,
    )
    recoveries = [record for record in run.of("recovery") if not record.fields["outcome"].startswith("joined")]
    found = {
        "kills": len(happened(run.output)),
        "returned": len({(r.rank, r.incarnation) for r in run.of("phases") if r.incarnation}),
        "lost_steps": sum(record.fields["lost_steps"] for record in run.of("recovery")),
        "deviation": deviation(plain.losses, run.losses),
        "mttr_seconds": mttr(run),
        "phase_seconds": phases(recoveries),
        "fault": failed(run, plain),
    }
    whole = found["kills"] == found["returned"] == count and found["lost_steps"] == 0
    return {"passed": whole and found["deviation"] <= ROUNDING, **found}


def happened(output: str) -> list[tuple[str, int, float]]:
    """(point, step, wall time) of each injected kill."""
    told = re.findall(r"injected kill: rank \d+, step (-?\d+), (\w+) .*wall time ([\d.]+)", output)
    return [(point, int(step), float(wall)) for step, point, wall in told]


def whole_again(kills: int) -> Callable[[list[EventRecord], str], bool]:
    """True once that many ranks were killed and as many new lives have taken part in a step."""

    def holds(events: list[EventRecord], output: str) -> bool:
        lives = {(r.rank, r.incarnation) for r in events if r.kind == "phases" and r.incarnation}
        return len(happened(output)) >= kills and len(lives) >= kills

    return holds


def mttr(run: Ran) -> dict[str, float]:
    """Medians of the seconds from a kill until all survivors have the step under way, or the next, and of a step."""
    commits: dict[int, float] = {}
    for record in run.of("step"):
        commits[record.fields["step"]] = max(record.wall, commits.get(record.fields["step"], 0.0))
    steps = [commits[step] - commits[step - 1] for step in commits if step - 1 in commits]
    spent = [commits.get(step, commits.get(step + 1, float("inf"))) - at for _, step, at in happened(run.output)]
    return {"to_next_commit": statistics.median(spent), "normal_step": statistics.median(steps)} if spent else {}


def phases(recoveries: Iterable[EventRecord]) -> dict[str, float]:
    """Phase of a recovery → median of its seconds on all survivors."""
    found: dict[str, list[float]] = {}
    for record in recoveries:
        for name, seconds in record.fields["seconds"].items():
            found.setdefault(name, []).append(seconds)
    return {name: statistics.median(values) for name, values in found.items()}


def library_edits(machine: Machine, settings: Settings) -> Figures:
    """Kills while the vendor's library is at work, one rank a device; not possible on one device.

    In the middle of a reduce; and, with four devices, of the rank that sends samples to its tensor-parallel group.
    """
    ranks = min(4, machine.devices)
    if ranks < 3:
        return {"passed": None, "why": "needs three devices: the library refuses two ranks on one"}
    found = {"reduce": _killed_in_library(machine, "edits", ranks, 1, "mid_reduce")}
    if ranks == 4:
        shared = ("--tensor-model-parallel-size", "2", "--no-create-attention-mask-in-dataloader")
        found["samples"] = _killed_in_library(machine, "samples", ranks, 0, "mid_forward", *shared)
    return {"passed": all(one["passed"] for one in found.values()), "ranks": ranks, **found}


def _killed_in_library(machine: Machine, name: str, ranks: int, victim: int, point: str, *flags: str) -> Figures:
    """A job that loses ``victim`` at ``point``, and no other rank."""
    size = ("--global-batch-size", str(4 * ranks), "--train-iters", str(MANY))
    kill = f"kill:rank={victim},losses=0,point={point},wait=1"
    script = ["delay:missing=1,count=0,point=before_step,seconds=0.1", kill]
    mirrors = ("--elastic-mirrors", "2")
    run = machine.job(name, ranks, *MODEL, *size, *flags, *faults(script), *mirrors, until=whole_again(1))
    lost_steps = sum(record.fields["lost_steps"] for record in run.of("recovery"))
    lost = sorted({record.fields["lost_rank"] for record in run.of("loss")})
    back = any(record.incarnation for record in run.of("phases"))
    return {
        "passed": not run.fault and lost_steps == 0 and back and lost == [victim],
        "lost": lost,
        "mttr_seconds": mttr(run),
        "fault": run.fault,
    }


def rejoin(machine: Machine, settings: Settings) -> Figures:
    """The return of a rank that holds ``state_bytes`` of master weights and moments, with another as its mirror."""
    hidden, layers = 128, 4
    while 12 * 12 * layers * hidden * hidden < settings.state_bytes:  # 12 bytes each of 12 h² parameters a layer
        hidden += 128
    model = (*MODEL, "--hidden-size", str(hidden), "--num-layers", str(layers), "--train-iters", str(MANY))
    script = ["delay:missing=1,count=0,point=before_step,seconds=0.2", "kill:rank=1,losses=0,point=before_step,wait=2"]

    def protected(events: list[EventRecord], output: str) -> bool:
        return any(r.kind == "migration" and r.rank == 1 and r.incarnation for r in events)

    run = machine.job(
        "rejoin", 2, *model, *faults(script), one_device=machine.devices < 2, seconds=300, until=protected
    )
    moved = [record.fields for record in run.of("migration") if record.rank == 1 and record.incarnation]
    if run.fault or not moved:
        return {"passed": False, "fault": run.fault or "the rank did not come back in time"}
    joins = [r for r in run.of("recovery") if r.fields["outcome"].startswith("joined")]
    return {
        "passed": sum(record.fields["lost_steps"] for record in run.of("recovery")) == 0,
        "hidden": hidden,
        "bytes_received": sum(one["bytes_received"] for one in moved),
        "background_seconds": max(one["background_seconds"] for one in moved),
        "stall_seconds": max(one["stall_seconds"] for one in moved),
        "admission_seconds": max((sum(r.fields["seconds"].values()) for r in joins), default=None),
    }


# -- cost --------------------------------------------------------------------------------------


def overhead(machine: Machine, settings: Settings) -> Figures:
    """Step time and device memory beside plain Megatron, in turn, on one device and on all of them."""
    alone = settings.plain_alone or 8 % machine.devices  # micro-batches of a step must divide
    worlds = [1] if alone else sorted({1, machine.devices})
    rows = []
    for world in worlds:
        ratios, memory, fault = [], {}, ""
        for trial in range(settings.trials):
            flags = (*MODEL, "--train-iters", str(settings.timed_steps))
            runs = {
                kind: machine.job(
                    f"overhead-{world}-{trial}-{kind}", world, *flags, elastic=kind == "elastic", one_device=world == 1
                )
                for kind in ("plain", "elastic")
            }
            if fault := failed(*runs.values()):
                break
            times = {
                kind: statistics.median(run.milliseconds[settings.timed_steps // 3 :]) for kind, run in runs.items()
            }
            ratios.append(times["elastic"] / times["plain"])
            memory = {kind: max(run.memory_mb.values(), default=None) for kind, run in runs.items()}
        row = {"ranks": world, "step_ratios": ratios, "memory_mb": memory, "fault": fault}
        rows.append({**row, "step_ratio": statistics.median(ratios) if ratios else None})
    return {"passed": not any(row["fault"] for row in rows), "worlds": rows}


def exact(machine: Machine, settings: Settings) -> Figures:
    """Exact mode with Megatron's own layers: the losses after a kill are those without, to the bit."""
    mode = ("--elastic-exact", "--deterministic-mode", "--transformer-impl", "local")
    flags = (*MODEL, *mode, "--train-iters", str(settings.steps))
    lose = (*faults(["kill:rank=1,step=2,point=mid_backward"]), "--no-elastic-respawn")

    def layout(ranks: int, pipeline: int) -> Figures:
        run = partial(machine.job, one_device=machine.devices < ranks, given=FIXED_ORDER)
        name, here = f"exact-{ranks}-{pipeline}", (*flags, *sizes(1, pipeline))
        whole, lost = machine.side_by_side(
            [partial(run, name, ranks, *here), partial(run, f"{name}-kill", ranks, *here, *lose)]
        )
        row = {"ranks": ranks, "pipeline": pipeline, "kills": len(happened(lost.output)), "fault": failed(whole, lost)}
        return {**row, "steps": len(whole.losses), "same_losses": whole.losses == lost.losses}

    rows = machine.side_by_side([partial(layout, 2, 1), partial(layout, 4, 2)])
    passed = all(
        row["same_losses"] and (row["kills"], row["steps"]) == (1, settings.steps) and not row["fault"] for row in rows
    )
    return {"passed": passed, "layouts": rows}


def fp8(machine: Machine, settings: Settings) -> Figures:
    """Layers in FP8, a rank lost in a step: losses of plain Megatron on one device. Or one line why there are none.

    A replica has one micro-batch a step: plain Megatron changes scales once a step then, too. Its own micro-batch has
    the rows of two replicas, and the loss is one over all tokens.
    """
    rows = machine.side_by_side([partial(_recipe, machine, settings, recipe) for recipe in settings.recipes])
    if told := [row["why"] for row in rows if "why" in row]:
        return {"passed": None, "why": told[0]}
    passed = all(
        (row["losses"], row["lost_steps"]) == (1, 0) and row["deviation"] <= ROUNDING_FP8 and not row["fault"]
        for row in rows
    )
    return {"passed": passed, "recipes": rows}


def _recipe(machine: Machine, settings: Settings, recipe: str) -> Figures:
    """One recipe of :func:`fp8`."""
    kind = ("--bf16", "--fp8-format", "hybrid", "--fp8-recipe", recipe, "--calculate-per-token-loss")
    flags, alone = (*MODEL, *kind, "--global-batch-size", "4"), ("--micro-batch-size", "4")
    check = machine.job(f"fp8-{recipe}-check", 1, *flags, *ending(SAVED), "--elastic-check", one_device=True)
    if told := [line for line in check.output.splitlines() if line.startswith("error: --fp8")]:
        return {"why": told[-1]}
    saved = machine.folder / f"fp8-{recipe}-saved"
    save, ends = ("--save", str(saved), "--save-interval", str(SAVED)), ending(settings.steps)
    first = machine.job(
        f"fp8-{recipe}-saving", 1, *flags, *alone, *ending(SAVED), *save, elastic=False, one_device=True
    )
    flags = (*flags, *ends, *from_checkpoint(saved))
    lost = (*faults([f"kill:rank=1,step={SAVED + 1},point=mid_backward"]), "--no-elastic-respawn")
    plain, run = machine.side_by_side(
        [
            partial(machine.job, f"fp8-{recipe}-plain", 1, *flags, *alone, elastic=False, one_device=True),
            partial(machine.job, f"fp8-{recipe}", 2, *flags, *lost, one_device=machine.devices < 2),
        ]
    )
    steps = sum(record.fields["lost_steps"] for record in run.of("recovery"))
    row = {"recipe": recipe, "losses": len(happened(run.output)), "lost_steps": steps}
    return {**row, "deviation": deviation(plain.losses, run.losses), "fault": failed(first, plain, run)}


SECTIONS: Mapping[str, Callable[[Machine, Settings], Figures]] = {
    "device": device,
    "kernels": kernels,
    "parity": parity,
    "kills": kills,
    "library_edits": library_edits,
    "overhead": overhead,
    "rejoin": rejoin,
    "exact": exact,
    "fp8": fp8,
}
"""In the order of the report. ``passed``: None where the machine does not allow the section."""
