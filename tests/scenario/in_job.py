"""A scenario as a real job under the launcher: processes, SIGKILL, sockets, Megatron's loop.

The job is as long as the scenario, unless a fault counts the losses before it. Then it goes on until all ranks are
back, as in :mod:`kill_walk`. Its losses are those of an undisturbed job. ``heavy`` and ``micro_batches`` have no
meaning here: a job measures its own costs, and its batch is that of its flags.
"""

from __future__ import annotations

from pathlib import Path

from megatron.elastic.config import flag_name
from tests.integration.elastic_job import JobResult, RunningJob, elastic_command, elastic_job
from tests.integration.kill_walk import DRAINED, DROPOUT, RATES, ROUNDING, cached, deviations, faults_in, kept, walk
from tests.scenario.in_model import Ending
from tests.scenario.scenario import RETURNS, Scenario, Wish

__all__ = ["flags_of", "play", "played"]

HELD_SECONDS = 3.0
"""Seconds for which all ranks wait before the step that follows a user's request, which then comes first."""
SAVING = ("--save-interval", "1000000", "--save")
LOST = 4
"""Exit status of a job whose state is lost and that has no checkpoint."""


def flags_of(scenario: Scenario) -> list[str]:
    """The flags of its settings."""
    flags = [] if scenario.returns else ["--no-elastic-respawn"]
    for name, value in scenario.settings:
        flag = flag_name(name)
        if isinstance(value, bool):
            flags.append(flag if value else f"--no-{flag[2:]}")
        else:
            flags += [flag, str(value)]
    if ("exact", True) in scenario.settings:
        flags.append("--calculate-per-token-loss")  # the mean over a micro-batch belongs to no sample
    return flags


def play(scenario: Scenario, folder: Path, undisturbed: Path | None = None) -> Ending:
    """Run ``scenario`` and compare its losses with an undisturbed job's. Raises ``AssertionError``.

    ``undisturbed``: a folder that keeps undisturbed runs for later scenarios. Prints the faults that struck.
    """
    return played(scenario, folder, undisturbed)[0]


def played(
    scenario: Scenario, folder: Path, undisturbed: Path | None = None, seconds: float = 240.0
) -> tuple[Ending, int]:
    """As :func:`play`; returns also how many faults struck."""
    shared = undisturbed or folder / "undisturbed"
    if any(fault.losses is not None or fault.rejoin is not None for fault in scenario.faults):
        returns, flags = scenario.back if scenario.back in RETURNS else "soon", flags_of(scenario)
        walked = walk(folder, scenario.layout, [scenario], *flags, seconds=seconds, shared=shared, returns=returns)
        return "kept", walked.kills
    result = _job(scenario, folder, seconds)
    struck = faults_in(result.output)
    told = ", ".join(f"rank {fault.rank} at {fault.point} of step {fault.step}" for fault in struck)
    print(f"exit status {result.code}, {len(result.committed)} steps, struck: {told or 'none'}", flush=True)
    if result.code == LOST:
        assert "is lost" in result.output and "Traceback" not in result.output, result.output[-4000:]
        return "lost", len(struck)
    drained = scenario.ends_early
    assert result.code == (DRAINED if drained else 0), result.output[-6000:]
    taken_back = 1 if ("snapshot", "state") in scenario.settings else 0  # docs/design.md §6.9
    lost = [record.fields["lost_steps"] for record in result.of("recovery")]
    assert max(lost, default=0) <= taken_back, f"committed steps were lost: {lost}"
    steps = set(result.committed)
    assert steps == set(range(1, max(steps) + 1)) and (drained or max(steps) == scenario.steps), sorted(steps)
    deviation = max(deviations(result, kept(shared, scenario.layout, max(steps)), evaluates=False).values())
    assert deviation < ROUNDING, f"losses deviate by {deviation}"
    return "kept", len(struck)


def _job(scenario: Scenario, folder: Path, seconds: float) -> JobResult:
    layout = scenario.layout
    pauses = [f"delay:step={wish.step + 1},seconds={HELD_SECONDS}" for wish in scenario.wishes]
    script = ";".join(word for word in (scenario.lingering, *pauses, *scenario.script) if word)
    flags = [*layout.flags, *layout.batch_flags, *DROPOUT, *RATES, *flags_of(scenario), *cached(folder)]
    if scenario.evaluate:
        flags += ["--eval-interval", str(scenario.evaluate), "--eval-iters", "1"]
    if script:
        flags += ["--elastic-allow-inject", "--elastic-inject", script]
    sizes = (scenario.ranks, layout.tensor, layout.pipeline, scenario.steps)
    if not scenario.wishes:
        return elastic_job(folder / "events", *sizes, *flags, seconds=seconds)
    command = elastic_command(folder / "events", *sizes, *flags, *SAVING, str(folder / "saved"))
    with RunningJob(folder / "events", command, seconds) as job:
        for wish in sorted(scenario.wishes, key=lambda one: one.step):
            _ask(job, wish)
        return job.finish()


def _ask(job: RunningJob, wish: Wish) -> None:
    job.wait_for(rf"iteration +{wish.step}/")
    if wish.what == "reshape":
        flags = tuple(
            word
            for pair in zip(("--tp", "--pp", "--dp", "--cp", "--ep"), map(str, wish.ranks), strict=False)
            for word in pair
        )
    else:
        flags = ("--ranks", ",".join(map(str, wish.ranks))) if wish.ranks else ()
    asked = job.ctl(wish.what, *flags)
    assert asked.returncode == 0, asked.stderr
