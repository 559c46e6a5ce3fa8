"""Run this package with each version of megatron-core, Python or torch, in an environment of its own; record what held.

    python -m tools.versions --folder out/versions                            # every release, about 20 minutes
    python -m tools.versions --folder out/versions --python 3.12 --megatron 0.19.2
    python -m tools.versions --folder out/versions --torch 2.14.1 --megatron 0.17.1
    python -m tools.versions --folder out/versions --checkout ../Megatron-LM  # its own pretrain_gpt.py, unmodified
    python -m tools.versions --folder out/versions --walk steps recovery phases  # kills alone

For each version on 4 ranks (PP 2 × DP 2, no dropout):

- parity: losses under ``--elastic`` and of plain Megatron;
- kill: the same with one rank killed, which comes back before the end: no step lost, the same losses;
- checkpoints: plain Megatron resumes ours, we resume plain Megatron's, and each version resumes that of each other
  one, as its plain Megatron does;
- ``--walk``, instead of these: every rank killed at every named point of these groups, in a running job with dropout
  (``tests/integration/kill_walk.py``).

The result goes to ``docs/measured/versions.json``, unless ``--record`` names another file. Rows of environments that
this call does not name stay as they were. ``python -m tools.version_table`` writes README's table from it.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

from megatron.elastic.observe.events import read_events
from tools import training_log
from tools.bench._common import machine

__all__ = ["Environment", "Failed", "Outcome", "Run", "compared", "main", "merged", "with_walks"]

ROOT = Path(__file__).resolve().parents[1]
RELEASES = ("0.17.1", "0.18.2", "0.19.2")
STEPS, SAVED_AT, KILLED_AT = 8, 3, 4
SETTLED = SAVED_AT + 2
"""Megatron's second log line after a start averages the first two steps: resumed runs are compared after this step."""
ROUNDING = 2e-6
"""Largest relative deviation of a loss, as printed with seven digits."""
RANKS = 4
WALKED, WALKS = "pp2dp2", ("steps", "recovery", "phases", "overlap")
"""Layout and groups of points of the kill walk."""
WALK_SECONDS = 3600.0
MODEL = shlex.split("""
    --num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32
    --micro-batch-size 2 --global-batch-size 16 --lr 1e-3 --min-lr 1e-4 --lr-decay-style cosine --lr-warmup-iters 1
    --mock-data --tokenizer-type NullTokenizer --vocab-size 255 --log-interval 1 --eval-interval 1000 --eval-iters 0
    --split 98,1,1 --make-vocab-size-divisible-by 64 --num-workers 0 --seed 7 --ckpt-format torch_dist
    --hidden-dropout 0 --attention-dropout 0 --pipeline-model-parallel-size 2 --clip-grad 0.5
""")
FAULTS = f"kill:rank=1,step={KILLED_AT};delay:missing=1,rank=0,count=0,seconds=2"
"""Rank 0 waits while a rank is missing, so that the lost one is back before the last step."""


class Failed(RuntimeError):
    """A job or an installation failed; the text is one line for a person."""


@dataclass(frozen=True)
class Outcome:
    """One cell of the table. ``deviation``: the largest relative one of a loss; ``failure``: empty if it held."""

    deviation: float = 0.0
    failure: str = ""


@dataclass(frozen=True)
class Environment:
    """A virtual environment of one release of megatron-core, or of a checkout of Megatron-LM beside one.

    ``torch``: the release of torch in it; empty: the one that ``requirements/torch.txt`` pins.
    """

    folder: Path
    python: str
    megatron: str
    checkout: Path | None = None
    torch: str = ""

    @property
    def name(self) -> str:
        """The environment's key in the record."""
        return f"py{self.python}-{'checkout' if self.checkout else self.megatron}{self._beside}"

    @property
    def _beside(self) -> str:
        return f"-torch{self.torch}" if self.torch else ""

    @property
    def interpreter(self) -> Path:
        return self.folder / f"py{self.python}-mcore{self.megatron}{self._beside}" / "bin" / "python"

    @property
    def tree(self) -> Path:
        """The tree that it runs. Native modules are for one torch: another one has a clone of the last commit."""
        return self.folder / f"tree{self._beside}" if self.torch else ROOT

    @property
    def variables(self) -> dict[str, str]:
        """Environment variables of everything that runs in it."""
        path = str(self.tree) if self.checkout is None else f"{self.checkout}:{self.tree}"
        return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}

    def make(self) -> None:
        """Install what is missing (scripts/env.sh). Raises :class:`Failed` with the installer's last line."""
        chosen = {
            "MEGATRON_ELASTIC_VENV": str(self.interpreter.parents[1]),
            "MEGATRON_ELASTIC_PYTHON": f"python{self.python}",
            "MEGATRON_ELASTIC_MEGATRON": self.megatron,
            "MEGATRON_ELASTIC_TORCH": self.torch,
        }
        # This tree's native modules serve every environment of this Python; another Python or torch builds its own.
        built = self.tree == ROOT and self.python == "{}.{}".format(*sys.version_info[:2])
        step = f"unset VIRTUAL_ENV; source scripts/env.sh && {'elastic_packages' if built else 'elastic_env'}"
        if self.tree != ROOT:
            self.tree.mkdir(parents=True, exist_ok=True)
            _installed(["git", "init", "--quiet"], self.tree)
            _installed(["git", "fetch", "--quiet", str(ROOT), "HEAD"], self.tree)
            _installed(["git", "checkout", "--quiet", "--force", "--detach", "FETCH_HEAD"], self.tree)
        _installed(["bash", "-c", step], self.tree, chosen)

    def about(self) -> dict[str, str]:
        """Return the versions of megatron-core, Python and torch, as the environment itself tells them."""
        code = (
            "import json, platform, torch, megatron.elastic.adaptor, megatron.core.package_info as m\n"
            "print(json.dumps(dict(megatron=m.__version__, python=platform.python_version(), torch=torch.__version__)))"
        )
        printed = subprocess.run(
            [self.interpreter, "-W", "ignore", "-c", code],
            cwd=self.tree,
            env=self.variables,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        if printed.returncode:
            raise Failed(printed.stderr.strip().splitlines()[-1])
        found: dict[str, str] = json.loads(printed.stdout.splitlines()[-1])
        found["megatron"] = found["megatron"].partition("+")[0]  # it adds the commit of whatever folder it runs in
        return found if self.checkout is None else {**found, "megatron": f"{found['megatron']} ({self.commit()})"}

    def commit(self) -> str:
        """Return the commit of the checkout, or its folder's name where it is no git repository."""
        assert self.checkout is not None
        ask = ["git", "-C", str(self.checkout), "rev-parse", "--show-toplevel", "HEAD"]
        told = subprocess.run(ask, capture_output=True, text=True, check=False).stdout.split()
        at_home = len(told) == 2 and Path(told[0]) == self.checkout
        return f"Megatron-LM {told[1][:12]}" if at_home else self.checkout.name


def _installed(command: Sequence[str], tree: Path, variables: Mapping[str, str] | None = None) -> None:
    """Run one command of an installation. Raises :class:`Failed` with its last line; stderr has all that it wrote."""
    done = subprocess.run(
        command,
        cwd=tree,
        env={**os.environ, **(variables or {})},
        stdout=sys.stderr,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    sys.stderr.write(done.stderr)
    if done.returncode:
        raise Failed((done.stderr.strip().splitlines() or ["no output"])[-1])


@dataclass(frozen=True)
class Run:
    """The end of one job: step → loss, and the events of the elastic runtime."""

    losses: Mapping[int, float]
    lost_steps: int = 0
    lost: int = 0
    joined: int = 0


@dataclass
class Bench:
    """The jobs of one environment, each ended after ``seconds``; logs, events and checkpoints go to ``folder``."""

    environment: Environment
    folder: Path
    under: Sequence[str]
    seconds: float
    _runs: dict[str, Run | Failed] = field(default_factory=dict)

    def run(self, name: str, *flags: str, elastic: bool) -> Run:
        """Return the finished job ``name``, run once. Raises :class:`Failed` if it ended badly."""
        if name not in self._runs:
            try:
                self._runs[name] = self._job(name, flags, elastic)
            except Failed as failure:
                self._runs[name] = failure
        found = self._runs[name]
        if isinstance(found, Failed):
            raise found
        return found

    def _job(self, name: str, flags: Sequence[str], elastic: bool) -> Run:
        events, log = self.folder / f"{name}.events", self.folder / f"{name}.log"
        checkout, tree = self.environment.checkout, self.environment.tree
        script = (checkout or tree) / "pretrain_gpt.py"
        adapt = ["--adapt"] if checkout is not None else []
        ours = ["--elastic", "--elastic-event-log", str(events)] if elastic else []
        # Without --elastic the launcher starts plain Megatron as torchrun does, and the adaptor makes it run on a CPU.
        command = [*self.under, "timeout", str(self.seconds), str(self.environment.interpreter), "-W", "ignore"]
        command += ["-m", "megatron.elastic.launch", "--nproc-per-node", str(RANKS), *adapt, str(script)]
        command += [*MODEL, "--train-iters", str(STEPS), *ours, *flags]
        print(f"[versions] {self.environment.name}: {name}", file=sys.stderr, flush=True)
        with log.open("w", encoding="utf-8") as out:
            code = subprocess.run(
                command, cwd=tree, env=self.environment.variables, stdout=out, stderr=out, check=False
            ).returncode
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
        if code:
            raise Failed(f"{name} ended with exit status {code}")
        losses = {step: line.loss for step, line in training_log.iterations_of(lines).items()}
        if set(losses) != set(range(min(losses, default=0), STEPS + 1)):
            raise Failed(f"{name} logged steps {sorted(losses)}")
        records = read_events(events) if elastic else []
        joined = [r for r in records if r.kind == "generation" and r.fields["reason"] == "join"]
        lost = training_log.losses_of_ranks(records)
        return Run(losses, training_log.lost_steps(records), len(lost), len({r.generation for r in joined}))

    def saving(self, name: str) -> tuple[str, ...]:
        return ("--save", str(self.folder / f"{name}.saved"), "--save-interval", str(SAVED_AT))

    def plain(self) -> Run:
        return self.run("plain", *self.saving("plain"), elastic=False)

    def elastic(self) -> Run:
        return self.run("elastic", *self.saving("elastic"), elastic=True)

    def resumed(self, writer: Bench, kind: str, elastic: bool) -> Run:
        """Return the job that goes on from step :data:`SAVED_AT` of ``writer``'s job ``kind``."""
        (writer.elastic if kind == "elastic" else writer.plain)()
        load = ("--load", str(writer.folder / f"{kind}.saved"), "--ckpt-step", str(SAVED_AT))
        name = f"{'elastic' if elastic else 'plain'}-resumes-{kind}-of-{writer.environment.name}"
        return self.run(name, *load, elastic=elastic)


def compared(reference: Run, other: Run, after: int = 0) -> Outcome:
    """Return how far the losses of ``other`` are from those of ``reference``, over all steps after ``after``."""
    steps = [step for step in reference.losses if step > after]
    missing = [step for step in steps if step not in other.losses]
    if missing or not steps:
        return Outcome(failure=f"steps {missing} were not logged")
    worst = max(abs(other.losses[step] / reference.losses[step] - 1) for step in steps)
    return Outcome(worst, "" if worst <= ROUNDING else f"losses deviate by {worst:.0e}")


def killed(bench: Bench) -> Outcome:
    """Return the outcome of a loss and a rejoin."""
    whole = bench.elastic()
    run = bench.run("killed", "--elastic-allow-inject", "--elastic-inject", FAULTS, elastic=True)
    if (run.lost, run.lost_steps, run.joined) != (1, 0, 1):
        return Outcome(failure=f"{run.lost} ranks lost, {run.lost_steps} steps lost, {run.joined} ranks rejoined")
    return compared(whole, run)


def checks(bench: Bench) -> dict[str, Outcome]:
    """Run all checks of one environment."""
    return {
        "parity": _tried(lambda: compared(bench.plain(), bench.elastic())),
        "kill": _tried(lambda: killed(bench)),
        "to_plain": _tried(lambda: compared(bench.plain(), bench.resumed(bench, "elastic", elastic=False), SETTLED)),
        "from_plain": _tried(lambda: compared(bench.elastic(), bench.resumed(bench, "plain", elastic=True), SETTLED)),
    }


def _tried(check: Callable[[], Outcome]) -> Outcome:
    try:
        return check()
    except Failed as failure:
        return Outcome(failure=str(failure))


def crossings(benches: Sequence[Bench]) -> list[dict[str, Any]]:
    """Run every pair of two environments: one resumes what the other wrote."""
    pairs = [(writer, reader) for writer in benches for reader in benches if reader is not writer]
    return [
        {
            "written_by": writer.environment.name,
            "resumed_by": reader.environment.name,
            "outcome": dataclasses.asdict(crossed(writer, reader)),
        }
        for writer, reader in pairs
    ]


def crossed(writer: Bench, reader: Bench) -> Outcome:
    """Compare our resume of another version's checkpoint with that of the reader's plain Megatron.

    Releases draw other initial weights and samples, so neither version's own uninterrupted run is a reference.
    """
    try:
        theirs = reader.resumed(writer, "elastic", elastic=False)
    except Failed:
        return Outcome(failure=f"plain Megatron {reader.environment.megatron} does not read it either")
    return _tried(lambda: compared(theirs, reader.resumed(writer, "elastic", elastic=True), SETTLED))


def rows_of(bench: Bench) -> dict[str, Any]:
    """Return the record of one environment."""
    about = bench.environment.about()
    done = {name: dataclasses.asdict(outcome) for name, outcome in checks(bench).items()}
    return {"name": bench.environment.name, **about, "checks": done}


def walked(bench: Bench, group: str) -> dict[str, Any]:
    """Kill each rank at each point of ``group``; raises :class:`Failed` if a step was lost or a loss differs."""
    environment, folder = bench.environment, bench.folder / f"walk-{group}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    command = [*bench.under, str(environment.interpreter), "-W", "ignore", "-m", "tests.integration.kill_walk", WALKED]
    command += ["--group", group, "--folder", str(folder), "--seconds", str(WALK_SECONDS)]
    print(f"[versions] {environment.name}: kill walk, {group}", file=sys.stderr, flush=True)
    done = subprocess.run(
        command, cwd=environment.tree, env=environment.variables, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise Failed(f"kill walk, {group}: {(done.stderr.strip().splitlines() or ['no output'])[-1]}")
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return told


def with_walks(before: Mapping[str, Any], name: str, walks: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the record with the outcome of ``walks`` (group → figures) in the row of environment ``name``.

    Raises :class:`Failed` if there is no such row.
    """
    rows = {row["name"]: row for row in before["versions"]}
    if name not in rows:
        raise Failed("its checks are not on record: run it without --walk first")
    rows[name] = {**rows[name], "walks": {**rows[name].get("walks", {}), **walks}}
    return {**before, "versions": list(rows.values())}


def merged(before: Mapping[str, Any], versions: Sequence[Any], checkpoints: Sequence[Any]) -> dict[str, Any]:
    """Return the record with new rows in place of those of the same environments, by name."""

    def joined(key: Callable[[Any], Any], old: Iterable[Any], new: Iterable[Any]) -> list[Any]:
        rows: dict[Any, dict[str, Any]] = {}
        for row in (*old, *new):
            walks = rows.get(key(row), {}).get("walks")
            rows[key(row)] = row if walks is None else {"walks": walks, **row}
        return sorted(rows.values(), key=key)

    return {
        "versions": joined(lambda row: row["name"], before.get("versions", ()), versions),
        "checkpoints": joined(
            lambda row: (row["written_by"], row["resumed_by"]), before.get("checkpoints", ()), checkpoints
        ),
    }


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m tools.versions", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--folder", type=Path, required=True, help="environments, logs and checkpoints go here")
    parser.add_argument("--megatron", nargs="+", default=RELEASES, metavar="VERSION", help="releases of megatron-core")
    parser.add_argument("--python", default="{}.{}".format(*sys.version_info[:2]), help="such as 3.12")
    parser.add_argument("--torch", default="", metavar="VERSION", help="such as 2.14.1; default: the pinned release")
    parser.add_argument("--checkout", type=Path, help="Megatron-LM beside us: its packages and script instead")
    parser.add_argument(
        "--walk", nargs="+", choices=WALKS, default=(), metavar="GROUP", help="walk kills, check nothing else"
    )
    parser.add_argument("--under", default="", help="command in front of each job, such as 'taskset -c 0,1'")
    parser.add_argument("--seconds", type=float, default=280.0, help="a job that takes longer is ended (default: 280)")
    parser.add_argument("--record", type=Path, default=ROOT / "docs" / "measured" / "versions.json", metavar="FILE")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Make the environments, run everything, write the record; 1 if any check failed."""
    args = parse(arguments)
    folder = args.folder.resolve()
    if args.checkout is not None:
        args.megatron, args.checkout = args.megatron[-1:], args.checkout.resolve()
    benches = []
    for release in args.megatron:
        environment = Environment(folder, args.python, release, args.checkout, args.torch)
        try:
            environment.make()
        except Failed as failure:
            print(f"error: {environment.name} cannot be installed: {failure}", file=sys.stderr)
            return 1
        runs = folder / "runs" / environment.name
        if not args.walk:
            shutil.rmtree(runs, ignore_errors=True)
        runs.mkdir(parents=True, exist_ok=True)
        benches.append(Bench(environment, runs, shlex.split(args.under), args.seconds))
    if args.walk:
        return _walk_all(benches, args.walk, args.record)
    versions, checkpoints = [rows_of(bench) for bench in benches], crossings(benches)
    before = json.loads(args.record.read_text(encoding="utf-8")) if args.record.is_file() else {}
    figures = merged(before, versions, checkpoints)
    figures |= {
        "machine": dataclasses.asdict(machine()),
        "command": "python -m tools.versions --folder out/versions",
        "date": date.today().isoformat(),
    }
    args.record.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    # Megatron itself reads no checkpoint of a newer release: recorded, and no failure of this package.
    outcomes = [o for row in versions for o in row["checks"].values()] + [cell["outcome"] for cell in checkpoints]
    failures = [o["failure"] for o in outcomes if o["failure"] and not o["failure"].startswith("plain Megatron")]
    print("\n".join(failures) or f"{len(outcomes)} checks held", file=sys.stderr)
    return int(bool(failures))


def _walk_all(benches: Sequence[Bench], groups: Sequence[str], record: Path) -> int:
    """Walk the kills of every environment; 1 if one did not end well. What did is kept."""
    failed = 0
    for bench, group in itertools.product(benches, groups):
        name, before = bench.environment.name, json.loads(record.read_text(encoding="utf-8"))
        try:
            with_walks(before, name, {})  # raises before the walk, not after it
            kept = with_walks(before, name, {group: walked(bench, group)})
        except Failed as failure:
            failed = 1
            print(f"{name}: {failure}", file=sys.stderr)
        else:
            record.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    return failed


if __name__ == "__main__":
    sys.exit(main())
