"""Many losses in one job: a list of scenarios, each begun when every rank is back from the one before.

A job that never ends by itself is given a script of faults ordered by the number of
losses before them (``losses=``, ``rejoin=`` of ``--elastic-inject``), is watched until the
last lost rank has come back, and is then drained. :func:`walk` checks, against the same
training undisturbed with one replica:

- every fault happened, at its point, in the order of the script, and no other rank was lost;
- every lost rank came back;
- every step was committed once with its samples, and its loss is within 1e-5;
- no recovery lost a step, no checkpoint failed.

What needs the same flags shares one job (:data:`GROUPS`), so that a start is paid once, and walks of the same
layout share one undisturbed run. One case by itself, or a few:

    python -m tests.integration.kill_walk pp4dp2 --points mid_update after_vote --ranks 3 5 --folder /tmp/walk
    python -m tests.integration.kill_walk tp4pp2 --group steps --folder /tmp/walk --elastic-tensor park
    python -m tests.integration.kill_walk pp2dp2 --group steps --folder /tmp/walk --elastic-exact \
        --calculate-per-token-loss --script tests/integration/delayed_scaling_training.py --fp8-format hybrid \
        --fp8-recipe delayed --fp8-amax-history-len 4 --fp8-amax-compute-algo max

Flags that it does not know go to the job.

When the lost rank is back is a dimension of its own (``RETURNS`` of :mod:`tests.scenario.scenario`): a small model's
step is over before a process has started, a large one's is not. Members linger at a chosen place while a rank is
missing.

A line a case goes to standard output: its steps until the next case, their seconds, how far losses deviate.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import shutil
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from megatron.elastic.engine.inject import KILL_POINTS, STEP_POINTS
from megatron.elastic.observe.events import read_events
from tests.integration.elastic_job import ROOT, JobResult, elastic_command, elastic_job, environment_of
from tests.integration.launcher import start_launcher
from tests.scenario.scenario import RETURNS, Layout, Scenario, parse

__all__ = [
    "DROPOUT",
    "GROUPS",
    "LAYOUTS",
    "MANY",
    "PHASES",
    "RATES",
    "TWO",
    "Walked",
    "cases_of",
    "compare",
    "flags_of",
    "undisturbed",
    "walk",
]

SCRIPT = ROOT / "pretrain_gpt.py"
DROPOUT = ("--hidden-dropout", "0.1", "--attention-dropout", "0.1")
MANY = 4000
LEAVING_SECONDS = 20.0
RATES = ("--lr", "1e-4", "--lr-decay-iters", "400", "--lr-warmup-iters", "2")
PHASES = ("--eval-interval", "3", "--eval-iters", "2", "--save-interval", "4")
BEHIND = ("--elastic-overlap", "both", "--elastic-bucket-elements", "1")
TWO = ("--elastic-mirrors", "2")
"""Where two ranks are lost at once: with one mirror they may share a block (of tied embeddings even across stages)."""
DRAINED = 3
ROUNDING = 1e-5
SUMS = ("--elastic-exact", "--elastic-comm")
"""Flags of the engine that decide how sums are rounded; the communicator in tensor-parallel groups above 2."""
INJECTED = r"(?<!Fault: )injected \w+: rank (\d+), step (-?\d+), (\w+) .*wall time ([\d.]+)"
"""A fault as it happens; a traceback that tells of it again does not count."""
NAMING = ("save_whole", "save_named", "save_tracked")
"""Points that only the first rank comes to while nobody is missing."""

GROUPS: Mapping[str, tuple[str, ...]] = {
    "recovery": tuple(point for point in KILL_POINTS if point.startswith(("in_join", "in_recovery", "in_migration"))),
    "steps": (*STEP_POINTS, "between_steps"),
    "overlap": tuple(point for point in KILL_POINTS if point.startswith("mid_overlap")),
    "phases": tuple(point for point in KILL_POINTS if point.startswith(("in_evaluate", "in_save", "save_"))),
}
"""Points that are walked in one job, most losses first. ``in_setup`` is before there is anything to recover."""


def flags_of(group: str, folder: Path) -> tuple[str, ...]:
    """The flags that the points of ``group`` need; checkpoints go to ``folder``."""
    match group:
        case "recovery":
            return TWO
        case "overlap":
            return BEHIND
        case "phases":
            return (*PHASES, "--save", str(folder / "saved"))
        case _:
            return ()


LAYOUTS = {
    "pp2dp2": Layout(1, 2, 2),
    "tp2dp2": Layout(2, 1, 2),
    "tp2pp2dp2": Layout(2, 2, 2),
    "tp4dp2": Layout(4, 1, 2),
    "tp4pp2": Layout(4, 2, 1),
    "pp4dp2": Layout(1, 4, 2),
    "pp2dp2v2": Layout(1, 2, 2, chunks=2),
    "ep2dp4": Layout(1, 1, 4, experts=2),
    "ep2pp2dp2": Layout(1, 2, 2, experts=2),
    "ep4pp2dp4": Layout(1, 2, 4, experts=4),
    "tp2ep2pp2dp2": Layout(2, 2, 2, experts=2),
    "cp4": Layout(1, 1, 1, context=4),
    "cp2pp2dp2": Layout(1, 2, 2, context=2),
}


def cases_of(layout: Layout, point: str) -> list[Scenario]:
    """Every rank that comes to ``point`` killed there.

    Points of recovery, admission and migration need a loss of another rank first.
    """
    cases = []
    for rank in range(1 if point in NAMING else layout.ranks):
        first = f"kill:rank={layout.elsewhere(rank)},losses=0,point=before_reduce"
        here, late = (f"kill:rank={rank},{when},point={point}" for when in ("losses=0", "rejoin=1"))
        if point == "in_join":
            cases.append(f"kill:rank={rank},losses=0,point=mid_backward {late}")
        elif point.startswith("in_migration"):
            cases.append(f"{first} {late}")
        elif point.startswith("in_recovery"):
            cases.append(f"{first} {here}")
            if point in ("in_recovery_edit", "in_recovery_promote", "in_recovery_resume"):
                cases.append(f"{first} {late}")  # while another is let in
        else:
            cases.append(here)
    return [parse(f"{layout} {case}") for case in cases]


def struck(case: Scenario) -> list[tuple[int, str]]:
    """(rank, point) of each of its faults."""
    return [(rank, fault.points[0]) for fault in case.faults for rank in sorted(fault.ranks)]


def victim(case: Scenario) -> int:
    """The rank that is lost at the point of the case."""
    return struck(case)[-1][0]


# -- one job ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Happened:
    """A fault as its victim announced it."""

    rank: int
    step: int
    point: str
    wall: float


def faults_in(text: str) -> list[Happened]:
    """The faults that ``text``, a job's output, tells of."""
    return [Happened(int(r), int(s), point, float(wall)) for r, s, point, wall in re.findall(INJECTED, text)]


@dataclass
class Watch:
    """A running job's output and events, each byte read once: reading takes the processor from those who come back."""

    said: Path
    events: Path
    faults: list[Happened] = field(default_factory=list)
    lives: set[tuple[int, int]] = field(default_factory=set)
    """(rank, incarnation) that took part in a step."""
    _read: dict[Path, int] = field(default_factory=dict)

    def look(self) -> None:
        """Read what is new."""
        self.faults += faults_in(self._news(self.said))
        for file in self.events.glob("rank*.jsonl"):
            for line in self._news(file).splitlines():
                if line.startswith('{"kind":"phases"'):
                    record = json.loads(line)
                    self.lives.add((record["rank"], record["incarnation"]))

    def whole_again(self, losses: int) -> bool:
        """Return whether all faults have happened and the newest life of every rank has taken part in a step.

        Not by the log: who is to say that a rank is back may be the next to die.
        """
        killed = Counter(fault.rank for fault in self.faults)
        return killed.total() >= losses and set(killed.items()) <= self.lives

    def _news(self, file: Path) -> str:
        """The whole lines that were added."""
        start = self._read.get(file, 0)
        with file.open("rb") as source:
            source.seek(start)
            text = source.read()
        text = text[: text.rfind(b"\n") + 1]
        self._read[file] = start + len(text)
        return text.decode(errors="replace")


def run_walk(
    folder: Path,
    layout: Layout,
    cases: Sequence[Scenario],
    *flags: str,
    seconds: float,
    returns: str = "soon",
    script: Path = SCRIPT,
) -> JobResult:
    """One job through all ``cases``; drained when the last lost rank is back, killed after ``seconds``.

    Samples come through loader workers, as in Megatron's own default: they read ahead, and that must not matter.
    """
    faults, losses = list[str](), 0
    for case in cases:
        faults += case.after(losses).script
        losses += len(struck(case))
    slow = Scenario(layout, back=returns).lingering
    command = elastic_command(
        folder / "events",
        layout.ranks,
        layout.tensor,
        layout.pipeline,
        MANY,
        *layout.flags,
        *layout.batch_flags,
        *DROPOUT,
        *RATES,
        *flags,
        *cached(folder),
        "--num-workers",
        "1",
        "--elastic-allow-inject",
        "--elastic-inject",
        ";".join([slow, *faults]),
        script=script,
    )
    folder.mkdir(parents=True, exist_ok=True)
    watch = Watch(folder / "output.txt", folder / "events")
    with watch.said.open("w") as out:
        job = start_launcher(command, environment_of(), out)
        end = time.monotonic() + seconds
        try:
            while job.poll() is None and time.monotonic() < end:
                watch.look()
                late = time.monotonic() > end - LEAVING_SECONDS  # the checks then say how far it came
                if late or watch.whole_again(losses):
                    job.send_signal(signal.SIGTERM)
                    with suppress(subprocess.TimeoutExpired):
                        job.wait(max(1.0, end - time.monotonic()))
                time.sleep(0.2)
        finally:
            if job.poll() is None:
                job.kill()
            code = job.wait()
    return JobResult(code, watch.said.read_text(), read_events(folder / "events"))


def cached(folder: Path) -> tuple[str, str]:
    """Megatron's indices of the data, made once: whoever comes back reads them."""
    return ("--data-cache-path", str(folder / "cache"))


def undisturbed(
    folder: Path,
    layout: Layout,
    steps: int,
    *flags: str,
    script: Path = SCRIPT,
    environment: dict[str, str] | None = None,
) -> JobResult:
    """The same training without faults, ended after ``steps``; on fewer ranks (:attr:`Layout.plain`)."""
    plain = layout.plain
    result = elastic_job(
        folder,
        plain.ranks,
        plain.tensor,
        plain.pipeline,
        MANY,
        *plain.flags,
        *layout.batch_flags,
        *DROPOUT,
        *RATES,
        *flags,
        "--exit-interval",
        str(steps),
        seconds=3000.0,
        script=script,
        environment=environment,
    )
    assert result.code == 0, result.output[-4000:]
    return result


def kept(folder: Path, layout: Layout, steps: int) -> JobResult:
    """An undisturbed run of ``steps`` or more, with evaluations, for all walks of such replicas; made if need be."""
    run = folder / f"{layout.plain}-{layout.batch}"
    if (run / "output.txt").is_file():
        result = JobResult(0, (run / "output.txt").read_text(), read_events(run / "events"))
        if max(result.committed) >= steps:
            return result
        shutil.rmtree(run)
    result = undisturbed(run / "events", layout, steps, *PHASES[:4], *cached(run))
    (run / "output.txt").write_text(result.output)
    return result


# -- what it is held against ---------------------------------------------------------------------


def check(cases: Sequence[Scenario], result: JobResult) -> None:
    """Assert all that needs no undisturbed run."""
    tail = result.output[-6000:]
    faults = faults_in(result.output)
    expected = [fault for case in cases for fault in struck(case)]
    for case, seen in episodes(cases, faults):
        assert [(fault.rank, fault.point) for fault in seen] == struck(case), f"{case}: seen {seen}\n{tail}"
    assert len(faults) == len(expected), f"more than scripted: {faults[len(expected) :]}\n{tail}"
    assert result.code == DRAINED, tail
    lives = Counter(rank for rank, _ in expected)
    lost = {(record.fields["lost_rank"], record.fields["lost_incarnation"]) for record in result.of("loss")}
    scripted_lives = {(rank, life) for rank, count in lives.items() for life in range(count)}
    assert lost == scripted_lives, f"lost {lost}, by the script {scripted_lives}"
    took_part = {(record.rank, record.incarnation) for record in result.of("phases")}
    assert set(lives.items()) <= took_part, f"did not come back: {set(lives.items()) - took_part}\n{tail}"
    assert all(record.fields["lost_steps"] == 0 for record in result.of("recovery"))
    assert "could not be written" not in result.output, "a loss is no reason to do without a checkpoint"
    steps = set(result.committed)
    assert steps == set(range(1, max(steps) + 1)), f"not committed: {set(range(1, max(steps) + 1)) - steps}"
    if re.search(r"log_interval \.+ 1\n", result.output):
        assert steps <= set(result.losses), f"without a log line: {steps - set(result.losses)}"
    samples = {record.fields["step"]: tuple(record.fields["samples"]) for record in result.of("step")}
    batch = cases[0].layout.batch
    assert samples == {step: (batch * (step - 1), batch * step) for step in samples}
    assert {point for _, point in expected} <= set(KILL_POINTS)


def episodes(cases: Sequence[Scenario], faults: Sequence[Happened]) -> list[tuple[Scenario, Sequence[Happened]]]:
    """Each case with the faults that are its own by their number, as far as the job came."""
    found, start = [], 0
    for case in cases:
        found.append((case, faults[start : start + len(struck(case))]))
        start += len(struck(case))
    return found


def deviations(result: JobResult, reference: JobResult, evaluates: bool = True) -> dict[int, float]:
    """Step → relative deviation of its loss, and of the validation after it. Every sample of every step counts once."""
    steps = set(result.committed)
    ledgers = {r.fields["step"]: r.fields["ledger"] for r in result.of("step")}
    assert ledgers == {r.fields["step"]: r.fields["ledger"] for r in reference.of("step") if r.fields["step"] in steps}
    told = [int(step) for step in re.findall(r"validation loss at iteration (\d+) \|", result.output)]
    assert len(told) == len(set(told)), f"evaluated twice: {told}"
    found = {step: _deviation(loss, reference.committed.get(step)) for step, loss in result.committed.items()}
    for step, loss in reference.validation.items():
        if evaluates and step < max(steps):
            found[step] = max(found[step], _deviation(loss, result.validation.get(step)))
    return found


def _deviation(loss: float, other: float | None) -> float:
    return float("inf") if other is None else abs(loss - other) / abs(loss)


def compare(result: JobResult, reference: JobResult) -> float:
    """The largest of the :func:`deviations`."""
    return max(deviations(result, reference).values())


def told(cases: Sequence[Scenario], result: JobResult, deviation: Mapping[int, float]) -> list[str]:
    """A line a case: its steps until the next case, their seconds, how far losses deviate."""
    lines, found = [], episodes(cases, faults_in(result.output))
    ends = [seen[0] for _, seen in found[1:]]
    for number, (case, seen) in enumerate(found, 1):
        last = ends[number - 1].step - 1 if number <= len(ends) else max(result.committed)
        steps = [step for step in deviation if seen[0].step <= step <= last]
        seconds = f"{ends[number - 1].wall - seen[0].wall:.1f} s, " if number <= len(ends) else ""
        worst = max((deviation[step] for step in steps), default=0.0)
        where = f"steps {seen[0].step}-{last}, {seconds}losses deviate by {worst:.1e}"
        lines.append(f"{number} of {len(cases)}: {case}: {where}")
    return lines


@dataclass(frozen=True)
class Walked:
    """The outcome of a walk."""

    kills: int
    returns: int
    """Lives after a rank's first that took part in a step."""
    steps: int
    lost_steps: int
    deviation: float
    seconds: float
    """From the first loss to the last."""


def walk(
    folder: Path,
    layout: Layout,
    cases: Sequence[Scenario],
    *flags: str,
    seconds: float = 170.0,
    shared: Path | None = None,
    returns: str = "soon",
    script: Path = SCRIPT,
) -> Walked:
    """Run, check and compare; with an undisturbed run in ``shared``, if other walks are to be held against it, too."""
    result = run_walk(folder, layout, cases, *flags, seconds=seconds, returns=returns, script=script)
    check(cases, result)
    steps = max(result.committed)
    if shared is None:
        further = (*training_flags(flags), *cached(folder))
        reference = undisturbed(folder / "undisturbed", layout, steps, *further, script=script)
    else:
        reference = kept(shared, layout, steps)
    deviation = deviations(result, reference, "--eval-interval" in flags)
    print("\n".join(told(cases, result, deviation)), flush=True)
    faults = faults_in(result.output)
    walked = Walked(
        kills=len(faults),
        returns=len({(r.rank, r.incarnation) for r in result.of("phases") if r.incarnation > 0}),
        steps=steps,
        lost_steps=sum(record.fields["lost_steps"] for record in result.of("recovery")),
        deviation=max(deviation.values()),
        seconds=faults[-1].wall - faults[0].wall,
    )
    print(walked, flush=True)
    assert all(r.fields["rehearsed_seconds"] is not None for r in result.of("ready")), "each return was rehearsed"
    assert walked.deviation < ROUNDING, f"losses deviate by {walked.deviation}"
    return walked


def training_flags(flags: Sequence[str]) -> list[str]:
    """``flags`` without those that do not matter to an undisturbed run: of the engine but its sums, of checkpoints."""
    kept, drop = list[str](), False
    for word in flags:
        of_engine = word.startswith(("--elastic-", "--save")) and word not in SUMS
        drop = of_engine or (drop and not word.startswith("--"))
        kept += [] if drop else [word]
    return kept


def main() -> None:
    """Walk what the command line asks for."""
    parser = argparse.ArgumentParser(prog="python -m tests.integration.kill_walk", description=main.__doc__)
    parser.add_argument("layout", choices=LAYOUTS)
    parser.add_argument("--group", choices=GROUPS, help="all of its points, or those of --points")
    parser.add_argument("--points", nargs="+", metavar="POINT", choices=sum(GROUPS.values(), ()), help="of one group")
    parser.add_argument("--ranks", nargs="+", type=int, help="those killed at these points (default: all)")
    parser.add_argument("--returns", choices=RETURNS, default="soon", help="when a lost rank is back")
    parser.add_argument("--folder", type=Path, required=True, help="where output, events and checkpoints go")
    parser.add_argument("--undisturbed", type=Path, help="a folder that keeps undisturbed runs for the next walk")
    parser.add_argument("--undisturbed-steps", type=int, default=0, help="how long one is made there if there is none")
    parser.add_argument("--script", type=Path, default=SCRIPT, help="what the job runs")
    parser.add_argument("--seconds", type=float, default=3600.0, help="when the job is given up")
    asked, further = parser.parse_known_args()
    groups = [name for name, points in GROUPS.items() if set(asked.points or points) <= set(points)]
    group = asked.group or (groups[0] if len(groups) == 1 else None)
    if group is None or group not in groups:
        parser.error("--group, or --points of one group")
    layout = LAYOUTS[asked.layout]
    cases = [case for point in asked.points or GROUPS[group] for case in cases_of(layout, point)]
    if asked.ranks is not None:
        cases = [case for case in cases if victim(case) in asked.ranks]
    if asked.undisturbed is not None and asked.undisturbed_steps:
        kept(asked.undisturbed, layout, asked.undisturbed_steps)
    flags = (*flags_of(group, asked.folder), *further)
    walked = walk(
        asked.folder,
        layout,
        cases,
        *flags,
        seconds=asked.seconds,
        shared=asked.undisturbed,
        returns=asked.returns,
        script=asked.script,
    )
    told = {"layout": asked.layout, "flags": " ".join(further), "group": group, "back": asked.returns}
    print(json.dumps({**told, **dataclasses.asdict(walked)}))


if __name__ == "__main__":
    main()
