"""Run Megatron-LM's own functional-test configurations at CPU size, and record what ran, what was refused and why.

    python -m tools.functional_configs ../Megatron-LM --folder out/configs --check     # flags only, a few minutes
    python -m tools.functional_configs ../Megatron-LM --folder out/configs            # trains each, with a loss

``../Megatron-LM``: a checkout of release 0.17.1; its ``pretrain_gpt.py`` is run as it is, by
``python -m megatron.elastic.launch --adapt``. For each configuration:

- check: the lines of ``--elastic-check``, none if nothing is refused;
- plain: the same arguments without ``--elastic``, and without ``--async-save``, which hangs there on a CPU;
- killed: with ``--elastic``, one rank killed at a random point of step 3 (seeded by the name), which returns. It must
  lose no step and have the losses of the plain run.

The result goes to ``docs/measured/functional_configs.json`` after each configuration, rows that are not named stay.
``python -m tools.configuration_tables`` writes docs/configurations.md from it.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

from megatron.elastic.engine.inject import STEP_POINTS
from megatron.elastic.observe.events import read_events
from tools import training_log
from tools.bench._common import machine
from tools.shrunk_configs import STEPS, Configuration, configurations, ranks, shrunk

__all__ = ["Row", "main"]

ROOT = Path(__file__).resolve().parents[1]
RECORD = ROOT / "docs" / "measured" / "functional_configs.json"
TOKENS, DOCUMENTS, WORDS = 60, 2000, 250
ROUNDING = 2e-6
"""Largest relative deviation of a loss, as printed with seven digits."""
BF16_ROUNDING = 2e-2
"""The same in bf16 and fp16, where the order of a sum shows."""


@dataclass
class Row:
    """The results of one configuration. ``refused``: the lines of the check. Empty failures: it held."""

    name: str
    ranks: int
    refused: list[str] = field(default_factory=list)
    status: str = "not run"
    """not run, refused, ran, failed; plain failed: ran, with nothing to compare; neither: plain Megatron fails too."""
    failure: str = ""
    deviation: float = 0.0
    kill: str = ""


def data_set(folder: Path) -> str:
    """Write a data set of random tokens, once; return its prefix."""
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
    from numpy import int32
    from torch import tensor

    prefix = folder / "tokens"
    if not prefix.with_suffix(".idx").is_file():
        draw = random.Random(7)
        builder = IndexedDatasetBuilder(str(prefix.with_suffix(".bin")), dtype=int32)
        for _ in range(DOCUMENTS):
            builder.add_document(tensor([draw.randrange(WORDS) for _ in range(TOKENS)]), [TOKENS])
        builder.finalize(str(prefix.with_suffix(".idx")))
    return str(prefix)


# ---------------------------------------------------------------- jobs


@dataclass(frozen=True)
class Bench:
    """The checkout, and the folder for all that is written."""

    checkout: Path
    folder: Path
    data: str
    under: Sequence[str]

    @property
    def environment(self) -> dict[str, str]:
        paths = f"{self.checkout}:{ROOT}"
        return {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}

    def arguments(self, case: Configuration, job: str, *flags: str) -> list[str]:
        """Return the launcher's arguments for ``case``."""
        home = self.folder / case.name / job
        shutil.rmtree(home, ignore_errors=True)
        home.mkdir(parents=True)
        script = str(self.checkout / "pretrain_gpt.py")
        words = [word for word in shrunk(case, str(home), self.data) if job != "plain" or word != "--async-save"]
        port = str(random.randrange(20000, 32000))  # two jobs on one machine may choose the same default
        return ["--nproc-per-node", str(ranks(case)), "--master-port", port, "--adapt", script, *words, *flags]

    def check(self, case: Configuration) -> list[str]:
        """Return the lines that ``--elastic-check`` refuses ``case`` with, or the last line of another failure.

        It runs in a fork of this process, which has imported what a worker imports.
        """
        arguments = self.arguments(case, "check", "--elastic", "--elastic-check")
        with tempfile.TemporaryFile("w+", errors="replace") as out:
            sys.stdout.flush()
            child = os.fork()
            if child == 0:
                _be_launcher(arguments, self, out.fileno())
            status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            out.seek(0)
            lines = out.read().splitlines()
        told = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
        if status == 0 and any("nothing is refused" in line for line in lines):
            return []
        return told or [f"failed: {next((line for line in reversed(lines) if line.strip()), 'no output')}"]

    def job(self, case: Configuration, name: str, *flags: str, seconds: float = 280.0) -> Job:
        """Run ``case`` to its end."""
        log, events = self.folder / case.name / f"{name}.log", self.folder / case.name / f"{name}.events"
        shutil.rmtree(events, ignore_errors=True)
        more = [word.replace("EVENTS", str(events)) for word in flags]
        command = [*self.under, "timeout", str(seconds), sys.executable, "-W", "ignore", "-m"]
        command += ["megatron.elastic.launch", *self.arguments(case, name, *more)]
        with log.open("w", encoding="utf-8") as out:
            code = subprocess.run(command, env=self.environment, stdout=out, stderr=out, check=False).returncode
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
        shutil.rmtree(self.folder / case.name / name, ignore_errors=True)
        return Job(code, lines, events)


def _be_launcher(arguments: Sequence[str], bench: Bench, out: int) -> None:
    """Be ``python -m megatron.elastic.launch`` with these arguments, in a process that was just forked."""
    code = 1
    try:
        os.dup2(out, 1)
        os.dup2(out, 2)
        os.environ.update(bench.environment)
        from megatron.elastic.launch.__main__ import main as launch

        code = launch(list(arguments))
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(bool(ended.code))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


@dataclass(frozen=True)
class Job:
    """A finished job: exit status, output, and the folder of its events."""

    code: int
    lines: Sequence[str]
    events: Path

    @property
    def losses(self) -> dict[int, float]:
        return {step: line.loss for step, line in training_log.iterations_of(self.lines).items()}

    @property
    def failure(self) -> str:
        """One line for a person, empty if every step was logged."""
        if self.code:
            said = [line for line in self.lines if "error: " in line.lower() or "could not" in line]
            return f"exit status {self.code}: {said[-1].strip()[:200] if said else ''}"
        missing = set(range(1, STEPS + 1)) - set(self.losses)
        return f"steps {sorted(missing)} were not logged" if missing else ""


def fault_for(name: str, count: int) -> str:
    """Return a kill of a random rank at a random point of step 3; the same for the same name.

    The others wait for its return at a boundary: a small model's steps are over before a process has started.
    """
    draw = random.Random(name)
    kill = f"kill:rank={draw.randrange(count)},step=3,point={draw.choice(STEP_POINTS)}"
    return f"{kill};delay:missing=1,count=0,point=between_steps,seconds=60"


def train(bench: Bench, case: Configuration, row: Row) -> None:
    """Run plain Megatron, and our job with a loss, into ``row``."""
    plain = bench.job(case, "plain")
    row.kill = fault_for(case.name, row.ranks)
    ours = ("--elastic", "--elastic-event-log", "EVENTS", "--elastic-allow-inject", "--elastic-inject", row.kill)
    killed = bench.job(case, "killed", *ours)
    row.failure, row.deviation = killed.failure, 0.0
    row.status = "failed" if row.failure else "ran"
    if row.failure:
        row.status = "neither" if plain.failure else "failed"
        return
    records = read_events(killed.events)
    lost, steps = len(training_log.losses_of_ranks(records)), training_log.lost_steps(records)
    joined = len({r.generation for r in records if r.kind == "generation" and r.fields["reason"] == "join"})
    if (lost, steps, joined) != (1, 0, 1):
        row.status, row.failure = "failed", f"{lost} ranks lost, {steps} steps lost, {joined} ranks returned"
    elif plain.failure:
        row.status, row.failure = "plain failed", plain.failure
    else:
        row.deviation = max(abs(killed.losses[step] / loss - 1) for step, loss in plain.losses.items())
        if row.deviation > (BF16_ROUNDING if {"--bf16", "--fp16"} & case.given.keys() else ROUNDING):
            row.status, row.failure = "failed", f"losses deviate by {row.deviation:.0e}"


# ---------------------------------------------------------------- record


def recorded(path: Path) -> dict[str, Row]:
    """Return the rows of a record by name."""
    if not path.is_file():
        return {}
    return {row["name"]: Row(**row) for row in json.loads(path.read_text(encoding="utf-8"))["configurations"]}


def write(path: Path, rows: Mapping[str, Row], others: Mapping[str, str]) -> None:
    """Write the record."""
    about: dict[str, Any] = {"megatron": "0.17.1", "steps": STEPS, "other_scripts": dict(others)}
    about["configurations"] = [asdict(rows[name]) for name in sorted(rows)]
    about["machine"] = asdict(machine())
    about["command"] = "python -m tools.functional_configs ../Megatron-LM --folder out/configs"
    about["date"] = date.today().isoformat()
    path.write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.functional_configs", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("checkout", type=Path, help="Megatron-LM's sources, release 0.17.1")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="configurations, such as gpt/gpt3_mcore_tp1_pp2")
    parser.add_argument("--folder", type=Path, required=True, help="data, logs and checkpoints go here")
    parser.add_argument("--check", action="store_true", help="check the flags of each, train none")
    parser.add_argument("--missing", action="store_true", help="train only those that have not run")
    parser.add_argument("--under", default="", help="command in front of each job, such as 'taskset -c 0,1'")
    parser.add_argument("--record", type=Path, default=RECORD, metavar="FILE")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Check or train, and write the record; 1 if a configuration failed."""
    args = parse(arguments)
    folder = args.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    found = configurations(args.checkout.resolve())
    others = {case.name: case.other_script or "no arguments" for case in found if case.other_script or not case.given}
    cases = [case for case in found if case.name not in others and case.name in (args.only or (case.name,))]
    _import_ahead(args.checkout.resolve())
    bench = Bench(args.checkout.resolve(), folder, data_set(folder), args.under.split())
    rows, failed = recorded(args.record), False
    for case in cases:
        row = rows.setdefault(case.name, Row(case.name, ranks(case)))
        row.refused = bench.check(case)
        if row.refused:
            row.status, row.failure = "refused", ""
        elif not args.check and not (args.missing and row.status == "ran"):
            train(bench, case, row)
        elif row.status == "refused":
            row.status = "not run"
        failed |= row.status == "failed"
        print(f"{case.name}: {row.status} {row.failure or '; '.join(row.refused)}", flush=True)
        write(args.record, rows, others)
    return int(failed)


def _import_ahead(checkout: Path) -> None:
    """Import what every worker imports, so that the forks of the check need not."""
    sys.path.insert(0, str(checkout))
    import torch  # noqa: F401

    import megatron.elastic.adaptor

    # isort: split
    import megatron.training

    import megatron.elastic.mcore.loop.training_loop  # noqa: F401


if __name__ == "__main__":
    sys.exit(main())
