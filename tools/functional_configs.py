"""Run Megatron-LM's own functional-test configurations at CPU size, and record what ran, what was refused and why.

    python -m tools.functional_configs ../Megatron-LM --folder out/configs --check     # flags only, a few minutes
    python -m tools.functional_configs ../Megatron-LM --folder out/configs            # trains each, with a loss

``../Megatron-LM``: a checkout of release 0.17.1; its ``pretrain_gpt.py`` is run as it is, by
``python -m megatron.elastic.launch --adapt``. For each configuration:

- check: the lines of ``--elastic-check``, none if nothing is refused;
- plain: without ``--elastic``, and otherwise as a CPU allows (:class:`tools.shrunk_configs.Reference`). Configurations
  with equal arguments for it share a run, whose log stays in the folder;
- killed: with ``--elastic``, one rank killed at a random point of step 3 (seeded by the name), which returns. It must
  lose no step and have the losses of the plain run.

Of a refused configuration only the plain run is made: where it fails, a CPU cannot run the configuration at all.

The result goes to ``docs/measured/functional_configs.json`` after each configuration, rows that are not named stay.
With ``--missing --seconds 500``, one call after the other goes on where the last one stopped.
``python -m tools.configuration_tables`` writes docs/configurations.md from it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import select
import shutil
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

from megatron.elastic.engine.inject import STEP_POINTS
from megatron.elastic.observe.events import read_events
from tests.integration.ports import free_port
from tools import training_log
from tools.bench._common import machine
from tools.shrunk_configs import STEPS, Configuration, Reference, configurations, ranks, shrunk

__all__ = ["Row", "main"]

ROOT = Path(__file__).resolve().parents[1]
RECORD = ROOT / "docs" / "measured" / "functional_configs.json"
TOKENS, DOCUMENTS, WORDS = 60, 2000, 250
JOB_SECONDS = 400
MISSING = ("not run", "refused", "plain failed")
"""What ``--missing`` runs: neither what ran nor what failed."""
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
    plain: str = ""
    """Of a refused one: how plain Megatron's run on this machine ended: "ran", or why it failed. Empty if not run."""


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

    def home(self, case: Configuration, job: str) -> Path:
        """Return an empty folder for what a job writes."""
        home = self.folder / case.name / job
        shutil.rmtree(home, ignore_errors=True)
        home.mkdir(parents=True)
        return home

    def arguments(self, count: int, words: Sequence[str]) -> list[str]:
        """Return the launcher's arguments for a job of ``count`` ranks, whose script has these ``words``."""
        script = str(self.checkout / "pretrain_gpt.py")
        return ["--nproc-per-node", str(count), "--master-port", str(free_port()), "--adapt", script, *words]

    def check(self, case: Configuration) -> list[str]:
        """Return the lines that ``--elastic-check`` refuses ``case`` with, or the last line of another failure."""
        words = shrunk(case, str(self.home(case, "check")), self.data)
        log = self.folder / case.name / "check.log"
        status = self._run(ranks(case), [*words, "--elastic", "--elastic-check"], log).code
        lines = _lines(log)
        told = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
        if status == 0 and any("nothing is refused" in line for line in lines):
            return []
        return told or [f"failed: {next((line for line in reversed(lines) if line.strip()), 'no output')}"]

    def elastic(self, case: Configuration, plain: Plain, *flags: str) -> Job:
        """Run ``case`` with ``--elastic`` and ``flags`` to its end, from the weights that ``plain`` began with."""
        home, events = self.home(case, "killed"), self.folder / case.name / "killed.events"
        shutil.rmtree(events, ignore_errors=True)
        begins = Reference.of(case).begins
        # The checkpoint that both runs begin with was saved without hashes.
        without = ("--verify-integrity",) if begins else ()
        words = [*shrunk(case, str(home), self.data, without), "--elastic", "--elastic-event-log", str(events)]
        if begins:
            words += _beginning(plain.start)
        job = self._run(ranks(case), [*words, *flags], self.folder / case.name / "killed.log", events)
        shutil.rmtree(home, ignore_errors=True)
        return job

    def plain(self, case: Configuration) -> Plain:
        """Run the reference of ``case``, unless its log, or that of an equal one, is in the folder."""
        reference = Reference.of(case)
        words = shrunk(case, "", self.data, reference.without)
        digest = hashlib.sha256(json.dumps([reference.ranks, words]).encode()).hexdigest()[:16]
        home = self.folder / "plain" / digest
        start, log = home / "start", home / "log"
        if log.is_file():
            return Plain(Job(0, _lines(log), home), start)
        shutil.rmtree(home, ignore_errors=True)
        (home / "writes").mkdir(parents=True)
        words = shrunk(case, str(home / "writes"), self.data, reference.without)
        if reference.begins:
            first = [*words, "--save", str(start), "--save-interval", "1", "--exit-interval", "1", "--no-save-optim"]
            begun = self._run(reference.ranks, first, home / "start.log")
            if begun.code:
                return Plain(begun, start)
            words += _beginning(start)
        job = self._run(reference.ranks, words, home / "unfinished.log")
        shutil.rmtree(home / "writes")
        if not job.failure:
            (home / "unfinished.log").rename(log)
        return Plain(job, start)

    def _run(self, count: int, words: Sequence[str], log: Path, events: Path | None = None) -> Job:
        """Run a job in a fork of this process, which has imported what a worker imports."""
        arguments = self.arguments(count, words)
        sys.stdout.flush()
        with log.open("w", encoding="utf-8") as out:
            child = os.fork()
            if child == 0:
                _be_launcher(arguments, out.fileno())
        return Job(_ended(child, JOB_SECONDS), _lines(log), events or log.parent)


def _be_launcher(arguments: Sequence[str], out: int) -> None:
    """Be ``python -m megatron.elastic.launch`` with these arguments, in a process that was just forked."""
    code = 1
    try:
        os.dup2(out, 1)
        os.dup2(out, 2)
        from megatron.elastic.launch.__main__ import main as launch

        code = launch(list(arguments))
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(bool(ended.code))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _ended(child: int, seconds: float) -> int:
    """Wait for a child's end and return its exit status; after ``seconds`` it is ended, with its job."""
    pidfd = os.pidfd_open(child)
    try:
        for wait, kind in ((seconds, signal.SIGTERM), (30.0, signal.SIGKILL)):
            if select.select([pidfd], [], [], wait)[0]:
                break
            os.kill(child, kind)
    finally:
        os.close(pidfd)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _lines(log: Path) -> list[str]:
    return log.read_text(encoding="utf-8", errors="replace").splitlines()


def _beginning(checkpoint: Path) -> tuple[str, ...]:
    """Return the flags to begin with the weights of a checkpoint."""
    return "--load", str(checkpoint), "--finetune", "--ckpt-format", "torch_dist"


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
            said = [line.strip() for line in self.lines if _says_why(line)]
            return f"exit status {self.code}: {said[-1][:200] if said else ''}"
        missing = set(range(1, STEPS + 1)) - set(self.losses)
        return f"steps {sorted(missing)} were not logged" if missing else ""


def _says_why(line: str) -> bool:
    """Return whether a line may say why a job failed."""
    known = ("ends with exit status", "failed during start-up")
    ends = line.startswith("[launch] ") and not any(words in line for words in known)
    return ends or "error: " in line.lower() or "could not" in line


@dataclass(frozen=True)
class Plain:
    """A job of plain Megatron, and the checkpoint it began with, if it had to."""

    job: Job
    start: Path


def fault_for(name: str, count: int) -> str:
    """Return a kill of a random rank at a random point of step 3; the same for the same name.

    The others wait for its return at a boundary: a small model's steps are over before a process has started.
    """
    draw = random.Random(name)
    kill = f"kill:rank={draw.randrange(count)},step=3,point={draw.choice(STEP_POINTS)}"
    return f"{kill};delay:missing=1,count=0,point=between_steps,seconds=200"


def train(bench: Bench, case: Configuration, row: Row) -> None:
    """Run plain Megatron, and our job with a loss, into ``row``."""
    begun = bench.plain(case)
    plain, row.kill = begun.job, fault_for(case.name, row.ranks)
    killed = bench.elastic(case, begun, "--elastic-allow-inject", "--elastic-inject", row.kill)
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
    parser.add_argument("--only", nargs="+", metavar="NAME", help="in this order, such as gpt/gpt3_mcore_tp1_pp2")
    parser.add_argument("--folder", type=Path, required=True, help="data, logs and checkpoints go here")
    parser.add_argument(
        "--packages", default="", metavar="FOLDER", help="has packages that Megatron's Muon needs; also in PYTHONPATH"
    )
    parser.add_argument("--check", action="store_true", help="check the flags of each, train none")
    parser.add_argument("--missing", action="store_true", help="only those that have not run, or not plain Megatron's")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no other configuration after this time")
    parser.add_argument("--record", type=Path, default=RECORD, metavar="FILE")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Check or train, and write the record; 1 if a configuration failed."""
    args = parse(arguments)
    folder = args.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    found = configurations(args.checkout.resolve())
    others = {case.name: case.other_script or "no arguments" for case in found if case.other_script or not case.given}
    cases = _chosen([case for case in found if case.name not in others], args.only)
    _import_ahead(args.checkout.resolve(), args.packages)
    bench = Bench(args.checkout.resolve(), folder, data_set(folder))
    rows, failed, began = recorded(args.record), False, time.monotonic()
    for case in cases:
        row = rows.setdefault(case.name, Row(case.name, ranks(case)))
        if args.missing and row.status not in MISSING:
            continue
        if time.monotonic() - began > args.seconds:
            break
        row.ranks, row.refused = ranks(case), bench.check(case)
        if row.refused:
            row.status, row.failure = "refused", ""
            if not args.check:
                row.plain = bench.plain(case).job.failure or "ran"
        elif not args.check:
            train(bench, case, row)
        elif row.status == "refused":
            row.status = "not run"
        failed |= row.status == "failed"
        print(f"{case.name}: {row.status} {row.failure or '; '.join(row.refused)}", flush=True)
        write(args.record, rows, others)
    return int(failed)


def _chosen(cases: Sequence[Configuration], names: Sequence[str] | None) -> list[Configuration]:
    """Return those with these names, in their order; all without names."""
    if names is None:
        return list(cases)
    by_name = {case.name: case for case in cases}
    unknown = [name for name in names if name not in by_name]
    if unknown:
        raise SystemExit(f"error: --only {' '.join(unknown)}: the checkout has no such configuration")
    return [by_name[name] for name in names]


def _import_ahead(checkout: Path, packages: str) -> None:
    """Import what every worker imports, so that the forks need not, in the environment of a job."""
    sys.path.insert(0, str(checkout))
    sys.path += [packages] if packages else []
    found = ":".join(filter(None, (str(checkout), str(ROOT), packages)))
    os.environ.update(PYTHONPATH=found, OMP_NUM_THREADS="1", CUDA_DEVICE_MAX_CONNECTIONS="1")
    import torch  # noqa: F401

    import megatron.elastic.adaptor

    # isort: split
    import megatron.training

    import megatron.elastic.mcore.loop.training_loop  # noqa: F401


if __name__ == "__main__":
    sys.exit(main())
