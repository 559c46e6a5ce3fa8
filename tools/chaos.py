"""Random jobs under random faults for a while, each judged by the history checker (``tools/history``).

    python -m tools.chaos --minutes 60 --seed 7           # a developer's tool; needs the tests beside it
    python -m tools.chaos --seed 7 --only 12              # the twelfth job of that run once more

Each job is drawn from the seed and its number: layout, settings and faults. Its kind decides who makes the faults:

    script   the scenario's own words (``tests/scenario``), injected at named points
    outside  SIGKILL and SIGSTOP to any worker at any instant, also to ranks on their way back; slow and late ranks;
             a wall clock that jumps, a slow disk; at the end perhaps a drained rank; checkpoints, at times on a disk
             that gets full
    nodes    several agents on one machine: whole nodes or their agents killed, stopped and started again, their way
             to the store cut; with etcd the coordinator too, and one of etcd's three members at a time
    hosts    two network namespaces: packets that are late, lost, or have a bit changed, a partition, and a cable that
             is pulled
    links    a link between two healthy ranks breaks

In the first three kinds the losses of training are compared with an undisturbed run's, bit by bit in exact mode. A
job fails if the checker finds anything, if it does not end in time or as it should, or if it lost a step. Then its
text and the command that repeats it are printed; where the in-process cluster fails by the same scenario, that one
with the fewest faults as well. When a signal comes is a matter of the machine, so a failure ``outside`` may need
several tries. The last line is one JSON object; exit status 1 if a job failed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path

from megatron.elastic.observe.events import read_events
from tests.chaos.test_training_chaos import Havoc, Reshaping
from tests.chaos.unsteady import Unsteady
from tests.chaos.wire import Quality, wire
from tests.cluster.history import drawn as drawn_scenario
from tests.cluster.history import rules_of, shrunk
from tests.integration.cable import cable
from tests.integration.elastic_job import ROOT, JobResult, elastic_command, elastic_job, environment_of
from tests.integration.etcd_server import etcd_members
from tests.integration.kill_walk import (
    DROPOUT,
    LAYOUTS,
    MANY,
    PHASES,
    RATES,
    ROUNDING,
    TWO,
    Watch,
    cached,
    deviations,
    training_flags,
    undisturbed,
)
from tests.integration.launcher import start_launcher
from tests.integration.launcher_cluster import Cluster, descendants, is_alive
from tests.integration.ports import free_port
from tests.integration.test_broken_links import SEVERED
from tests.integration.test_saving import can_mount
from tests.integration.test_two_hosts import address, namespaces, running, why_not
from tests.scenario import in_job
from tests.scenario.scenario import Layout
from tools.history.judge import Rules

__all__ = ["Job", "drawn", "main"]

DRAINED, UNSAVED = 3, 4
EXACT = ("--elastic-exact", "--calculate-per-token-loss")
NODE_SECONDS = 600.0
"""Seconds that agents may take until all ranks of a job are back."""
JOB_SECONDS = 1800.0
"""Seconds that a job of the kind ``outside`` may take for all its losses."""
STATE = ("--elastic-snapshot", "state")
MUON = ("--optimizer", "muon")
LOST_STEPS = re.compile(r'"lost_steps":([1-9]\d*)')
KINDS = {"outside": 4, "script": 3, "nodes": 3, "hosts": 1, "links": 1}
"""Kind of job → its share."""


@dataclass(frozen=True)
class Setting:
    """Flags that a job may have. ``fits``: whether a layout takes them; ``exact``: whether exact mode does."""

    words: tuple[str, ...]
    fits: Callable[[Layout], bool] = lambda layout: True
    exact: bool = True


SETTINGS: tuple[tuple[Setting, ...], ...] = (
    (
        Setting(("--elastic-migrate-after", "0")),
        Setting(("--elastic-migration", "blocking", "--elastic-migrate-after", "0")),
        Setting(("--elastic-ownership", "contiguous")),
    ),
    (Setting(("--elastic-comm", "gloo")), Setting(("--elastic-transport", "tcp"))),
    (Setting(("--num-workers", "1")),),
    (Setting(("--elastic-overlap", "both", "--elastic-bucket-elements", "1")),),
    (
        Setting(("--elastic-expert-balance", "homes"), lambda layout: layout.experts > 1),
        Setting(("--elastic-expert-balance", "replicas"), lambda layout: layout.experts > 1),
        Setting(("--elastic-schedule", "zero-bubble"), lambda layout: layout.pipeline > 1 == layout.chunks),
        Setting(("--elastic-tensor", "park"), lambda layout: layout.tensor > 1),
    ),
    (
        Setting(("--bf16",)),
        Setting(MUON, exact=False),
        Setting(("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1")),
        Setting(("--sequence-parallel",), lambda layout: layout.tensor > 1),
    ),
    (Setting(("--no-elastic-background-save",)), Setting(STATE)),
)
"""Of each line a job has nothing in half of all cases, else one of those that fit."""
BF16_ROUNDING = 1e-3
CUT = Quality(lost=1.0)
NETWORKS = {
    "late": Quality(delay=0.02, jitter=0.01),
    "losing packets": Quality(lost=0.03),
    "changing bits": Quality(changed=0.03),
    "cut": CUT,
}
"""What a network may be for a while."""


@dataclass(frozen=True)
class Job:
    """One job, as it was drawn. ``dice``: seed of what is drawn while it runs."""

    kind: str
    layout: str
    faults: int
    dice: int
    exact: bool = False
    flags: tuple[str, ...] = ()
    full_disk: bool = False
    unsteady: bool = False
    """Between losses the wall clock jumps, and the disk is slow at times."""
    drains: bool = False
    etcd: bool = False
    through: tuple[Layout, ...] = ()
    """Sizes that a user asks for in turn while ranks are lost. Some may be refused."""

    def __str__(self) -> str:
        left_out = ("kind", "flags", "through")
        words = [f"{name}={value}" for name, value in vars(self).items() if value and name not in left_out]
        through = [f"through={'|'.join(map(str, self.through))}"] if self.through else []
        return " ".join([self.kind, *words, *through, *self.flags])


@dataclass
class Played:
    """The outcome of a job. ``why``: what was wrong with it."""

    faults: int = 0
    rules: Rules = field(default_factory=Rules)
    why: list[str] = field(default_factory=list)
    output: str = ""
    smaller: str = ""
    """The scenario in which the in-process cluster fails too."""


def drawn(seed: str, number: int) -> Job:
    """Return the job of this number."""
    dice = random.Random(f"{seed}.{number}")
    kind = dice.choices(list(KINDS), list(KINDS.values()))[0]
    layout = dice.choice(list(LAYOUTS))
    sizes = layout_of(kind, layout)
    ranks, can_be_exact = sizes.ranks, sizes.chunks == sizes.experts == sizes.context == 1
    flags: list[str] = []
    if kind == "outside" and dice.random() < 0.5:
        late = f"delay:rank={dice.randrange(ranks)},count=0,seconds={dice.uniform(0.01, 0.1):.3f}"
        slow = f"slow:rank={dice.randrange(ranks)},step=3-4000,factor={dice.choice((2, 4))}"
        flags += ["--elastic-allow-inject", "--elastic-inject", dice.choice((late, slow))]
    etcd = kind == "nodes" and dice.random() < 0.5
    exact = kind == "outside" and can_be_exact and dice.random() < 0.3
    if kind in ("outside", "nodes"):
        for line in SETTINGS:
            able = [setting.words for setting in line if setting.fits(sizes) and (setting.exact or not exact)]
            able = [words for words in able if not (etcd and "gloo" in words)]  # gloo takes its store from an agent
            flags += dice.choice(able) if able and dice.random() < 0.5 else ()
    through = _sizes(sizes, dice) if kind == "outside" and dice.random() < 0.3 else ()
    return Job(
        kind=kind,
        layout=layout,
        faults=dice.randint(4, 12) if kind == "outside" else dice.randint(1, 3),
        dice=dice.randrange(10**6),
        exact=exact,
        flags=tuple(flags),
        full_disk=kind == "outside" and can_mount() and dice.random() < 0.2,
        unsteady=kind == "outside" and dice.random() < 0.3,
        drains=dice.random() < 0.3 and not through,  # no rank of a single replica may leave
        etcd=etcd,
        through=through,
    )


def _sizes(layout: Layout, dice: random.Random) -> tuple[Layout, ...]:
    """Return some sizes of as many ranks as ``layout`` has, and at the end its own."""
    powers = [2**power for power in range(4)]
    every = [
        Layout(tensor, pipeline, data, experts=experts, context=context)
        for tensor, pipeline, data, context in itertools.product(powers, powers, powers, (1, 2))
        for experts in ((1,) if layout.experts == 1 else (1, 2, 4))
        if tensor * pipeline * data * context == layout.ranks and experts <= data
    ]
    return (*dice.sample(every, 3), layout)


def layout_of(kind: str, name: str) -> Layout:
    """Return the layout of a job; of several nodes, that of two."""
    return Layout(1, 1, 4) if kind == "nodes" else LAYOUTS[name]


def play(job: Job, folder: Path) -> Played:
    """Run a job, and judge it. ``folder``: of the whole session, which keeps undisturbed runs."""
    here = Path(tempfile.mkdtemp(prefix=f"{job.kind}-", dir=folder))
    played = Played()
    try:
        ACTS[job.kind](job, here, played)
    except Exception as error:  # whatever a job ends with is a finding
        played.why.append(f"{type(error).__name__}: {error}"[:4000])
    for events in sorted(here.glob("**/events")):
        if "undisturbed" not in events.parts:
            _judge(events, played)
    (here / "why.txt").write_text("\n".join(played.why) + "\n\n" + played.output)
    return played


def _judge(events: Path, played: Played) -> None:
    """The history checker, as a program of its own; and no step was lost."""
    flags = [*(["--exact"] if played.rules.exact else []), *(["--state-mode"] if played.rules.state_mode else [])]
    command = [sys.executable, "-m", "tools.history", str(events), *flags]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        played.why.append(f"{shlex.join(command[1:])}\n{done.stdout[-3000:]}{done.stderr}")
    lost = [file.name for file in events.glob("rank*.jsonl") if LOST_STEPS.search(file.read_text(errors="replace"))]
    if lost and not played.rules.state_mode:
        played.why.append(f"a step was lost: {', '.join(lost)}")


# -- kinds -------------------------------------------------------------------------


def _script(job: Job, folder: Path, played: Played) -> None:
    scenario = drawn_scenario(random.Random(job.dice))
    played.rules = rules_of(scenario)
    played.output = f"python -m tests.scenario '{scenario}' --as job"
    try:
        _, played.faults = in_job.played(scenario, folder, folder.parent / "undisturbed")
    except AssertionError:
        least = shrunk(scenario)
        played.smaller = "" if least is None else str(least)
        raise


def _rules(job: Job) -> Rules:
    """With Muon copies receive stepped state, whatever the flags say."""
    return Rules(exact=job.exact, state_mode={STATE[-1], MUON[-1]} & {*job.flags} != set())


def _flags(job: Job, folder: Path) -> list[str]:
    exact = EXACT if job.exact else ()
    return [*DROPOUT, *RATES, *PHASES, *TWO, *exact, *cached(folder), *job.flags]


def _command(job: Job, folder: Path, *launch: str) -> list[str]:
    layout: Layout = LAYOUTS[job.layout]
    sizes = (layout.ranks, layout.tensor, layout.pipeline, MANY)
    saved = ("--save", str(folder / "saved"), *layout.flags, *layout.batch_flags)
    return elastic_command(folder / "events", *sizes, *_flags(job, folder), *saved, launch=launch)


def _outside(job: Job, folder: Path, played: Played) -> None:
    played.rules = _rules(job)
    name, layout = f"chaos-{job.dice}-{os.getpid()}", LAYOUTS[job.layout]
    command = _command(job, folder, "--rdzv-id", name)
    if job.full_disk:
        (folder / "saved").mkdir()
        inside = f"mount -t tmpfs -o size=1600k none {folder / 'saved'} && exec {shlex.join(command)}"
        command = ["unshare", "--mount", "sh", "-c", inside]
    watch = Watch(folder / "output.txt", folder / "events")
    machine = Unsteady(folder / "machine") if job.unsteady else None
    reshaping = Reshaping(name, job.through)
    with watch.said.open("w") as out:
        launcher = start_launcher(command, environment_of(machine.environment if machine else None), out)
        try:
            dice = random.Random(job.dice)
            havoc = Havoc(launcher, watch, layout.ranks, dice, JOB_SECONDS)
            havoc.wait_until_whole()
            with reshaping.going_round() if job.through else nullcontext():
                while havoc.lost.total() < job.faults:
                    troubles = 0 if machine is None else _trouble(machine, dice)
                    before = havoc.lost.total()
                    havoc.strike()
                    played.faults += havoc.lost.total() - before + troubles
                havoc.wait_until_whole()
            if job.drains:
                _drain(name, job.dice % layout.ranks)
            launcher.send_signal(signal.SIGTERM)
            launcher.wait(120.0)
        finally:
            if launcher.poll() is None:
                launcher.kill()
            code = launcher.wait()
            played.output = watch.said.read_text()[-6000:]
    allowed = (DRAINED, UNSAVED) if job.full_disk else (DRAINED,)
    assert code in allowed, f"exit status {code}"
    if job.through:
        done = sum("since step" in line for line in reshaping.told)
        print(f"  reshaped {done} times of {len(reshaping.told)}", flush=True)
        (folder / "told.txt").write_text("\n".join(reshaping.told))
    _same_losses(job, folder, layout, watch.said.read_text(errors="replace"))


def _same_losses(job: Job, folder: Path, layout: Layout, output: str, *flags: str) -> None:
    """Assert that the job committed the losses of an undisturbed run, and printed its validation losses if any."""
    result = JobResult(0, output, read_events(folder / "events"))
    further = (*flags, *PHASES[:4], *training_flags((*(EXACT if job.exact else ()), *job.flags)), *cached(folder))
    reference = undisturbed(folder / "undisturbed" / "events", layout, max(result.committed), *further)
    worst = max(deviations(result, reference, bool(output)).values())
    print(f"  losses deviate by {worst:.1e}", flush=True)
    bound = 0.0 if job.exact else BF16_ROUNDING if "--bf16" in job.flags else ROUNDING
    assert worst <= bound, f"losses deviate by {worst:.1e}, allowed are {bound:.0e}"


def _trouble(machine: Unsteady, dice: random.Random) -> int:
    """Let the machine's clock jump, and its disk be slow or not; return the number of these faults."""
    slow = dice.random() < 0.5
    machine.clock(dice.randint(-7200, 7200))
    machine.disk(dice.uniform(0.001, 0.02) if slow else 0.0)
    print(f"  the clock jumps, the disk is {'slow' if slow else 'quick'}", flush=True)
    return 1 + slow


def _drain(name: str, rank: int) -> None:
    command = [sys.executable, "-m", "megatron.elastic.ctl", "drain", "--ranks", str(rank), "--run-id", name]
    asked = subprocess.run(command, cwd=ROOT, env=environment_of(), capture_output=True, text=True, check=False)
    assert asked.returncode == 0, asked.stderr
    time.sleep(3.0)


def _nodes(job: Job, folder: Path, played: Played) -> None:
    """Four ranks on two agents, or six on three."""
    dice, nodes = random.Random(job.dice), 2 + job.dice % 2
    played.rules = _rules(job)
    batch = ("--global-batch-size", str(4 * nodes))
    plain = elastic_command(
        *(folder / "events", 2 * nodes, 1, 1, MANY),
        *(*_flags(job, folder), "--save", str(folder / "saved"), *batch),
        *("--elastic-block-bytes", "4096", "--elastic-quarantine-after", "0"),
    )
    script = plain[plain.index(str(ROOT / "pretrain_gpt.py")) :]
    with ExitStack() as stack:
        members = stack.enter_context(etcd_members(folder, 3)) if job.etcd else ()
        ports = [member.port for member in members] or [free_port()]
        ways = [stack.enter_context(cable(port)) for port in ports]
        last = nodes - 1
        by_way = [way.port for way in ways]
        ends = {node: _store(job.etcd, by_way if node == last else ports) for node in range(nodes)}
        cluster = Cluster(2, nodes=nodes, command=script, node_options=ends)
        stack.callback(cluster.close)
        try:
            ranks = cluster.workers * nodes
            _whole(ranks, folder, 0.0, cluster)
            for _ in range(job.faults):
                node = dice.randrange(0 if job.etcd else 1, nodes)
                acts = ("node", "agent", "stopped", "cut" if node == last else "node", *(["member"] * len(members[:2])))
                how = dice.choice(acts)
                print(f"  {how}: node {node}", flush=True)
                played.faults += 1
                if how == "cut":
                    for way in ways:
                        way.cut()
                    time.sleep(dice.uniform(0.2, 6.0))
                    for way in ways:
                        way.mend()
                elif how == "member":
                    member = dice.choice(members)
                    member.end()
                    time.sleep(dice.uniform(0.2, 6.0))
                    member.start()
                else:
                    _strike(cluster, node, how, dice.uniform(0.2, 6.0))
                _whole(ranks, folder, time.time(), cluster)  # who was lost may have taken a step since the fault began
            os.kill(cluster.agents[0].pid, signal.SIGTERM)
            codes = [cluster.exit_code(node) for node in range(nodes)]
            assert codes == [DRAINED] * nodes, f"exit statuses {codes}"
        finally:
            played.output = cluster.text()[-6000:]
    # What a node printed last may be lost with it, so validation losses are not compared.
    _same_losses(job, folder, Layout(1, 1, 2 * nodes), "", *batch)


def _store(etcd: bool, ports: Sequence[int]) -> tuple[str, ...]:
    if etcd:
        return ("--rdzv-backend", "etcd", "--rdzv-endpoint", ",".join(f"127.0.0.1:{port}" for port in ports))
    return ("--master-port", str(ports[0]))


def _strike(cluster: Cluster, node: int, how: str, seconds: float) -> None:
    """Lose a node, its agent alone, or its agent for a while; a dead one is started again after ``seconds``."""
    agent = cluster.agents[node]
    if how == "stopped":
        os.kill(agent.pid, signal.SIGSTOP)
        time.sleep(seconds)
        os.kill(agent.pid, signal.SIGCONT)
    else:
        for pid in [agent.pid, *(descendants(agent.pid) if how == "node" else ())]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(seconds)
    if agent.poll() is not None or not is_alive(agent.pid):
        agent.wait()
        cluster.start_agent(node)


def _whole(ranks: int, folder: Path, since: float, cluster: Cluster | None = None) -> None:
    """Wait until the newest line of a step of every rank is later than ``since``, and all are of one generation.

    Raises ``AssertionError`` if time is up, or all agents of ``cluster`` have ended.
    """
    end = time.monotonic() + NODE_SECONDS
    while True:
        newest = [_newest(file, since) for file in sorted((folder / "events").glob("rank*.jsonl"))]
        if len(newest) == ranks and None not in newest and len(set(newest)) == 1:
            return
        assert time.monotonic() < end, f"not whole again: generations of the newest steps {newest}"
        ended = cluster is not None and all(agent.poll() is not None for agent in cluster.agents.values())
        assert not ended, "all agents have ended"
        time.sleep(0.2)


def _newest(file: Path, since: float) -> int | None:
    """The generation of the newest step of a rank after ``since``."""
    with file.open("rb") as log:
        log.seek(max(0, file.stat().st_size - 20_000))
        lines = [line for line in log.read().splitlines() if line.startswith(b'{"kind":"phases"')]
    for line in reversed(lines):
        with suppress(ValueError):
            found = json.loads(line)
            return int(found["generation"]) if found["wall"] > since else None
    return None


def _hosts(job: Job, folder: Path, played: Played) -> None:
    if why_not():
        return
    dice = random.Random(job.dice)
    with namespaces(folder) as both:
        ends = [(pod.namespace, pod.device, f"{address(pod.index)}/24") for pod in both]
        with wire(ends, job.dice) as between, running(folder, both) as (first, second):
            second.wait_for(r"iteration +3/")
            for _ in range(job.faults):
                began, how = time.time(), dice.choice(tuple(NETWORKS))
                print(f"  {how}", flush=True)
                played.faults += 1
                between.become(NETWORKS[how])
                time.sleep(dice.uniform(0.2, 6.0))
                between.become(Quality())
                _whole(2, folder, began)
            said = len(first.output)
            between.become(CUT)
            played.faults += 1
            gone = first.wait_for(r"recovered at generation", said).end()
            at = int(first.wait_for(r"iteration +(\d+)/", gone).group(1))
            first.wait_for(rf"iteration +{at + 3}/", gone)
            first.launcher.send_signal(signal.SIGTERM)
            played.output = first.finish().output[-6000:]


def _links(job: Job, folder: Path, played: Played) -> None:
    dice = random.Random(job.dice)
    one, other = dice.sample(range(4), 2)
    script = folder / "severed.py"
    text = SEVERED.replace('"RANK"] == "1" and self.rank == 1', f'"RANK"] == "{one}" and self.rank == {one}')
    text = text.replace("calls == 4", f"calls == {dice.randint(2, 30)}").replace("sever(3)", f"sever({other})")
    script.write_text(text)
    flags = ("--elastic-transport", "tcp", *DROPOUT, *RATES)
    done = elastic_job(folder / "events", 4, 1, 2, 20, *flags, script=script)
    played.faults, played.output = 1, done.output[-6000:]
    assert done.code == 0, f"exit status {done.code}"


Act = Callable[[Job, Path, Played], None]
ACTS: Mapping[str, Act] = {
    "script": _script,
    "outside": _outside,
    "nodes": _nodes,
    "hosts": _hosts,
    "links": _links,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """0 if all jobs passed."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.chaos", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=60.0, help="begin no job after so many")
    parser.add_argument("--seed", default=str(time.time_ns() % 10_000))
    parser.add_argument("--only", type=int, help="run the job of this number alone")
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), help="leave out jobs of other kinds")
    parser.add_argument("--folder", type=Path, help="keeps logs and outputs (default: a temporary one)")
    asked = parser.parse_args(arguments)
    folder = asked.folder or Path(tempfile.mkdtemp(prefix="chaos"))
    folder.mkdir(parents=True, exist_ok=True)
    print(f"--seed {asked.seed}, logs in {folder}", flush=True)
    began, number, jobs, faults, failed = time.monotonic(), asked.only or 0, 0, 0, list[int]()
    while time.monotonic() - began < 60 * asked.minutes:
        job = drawn(asked.seed, number)
        if asked.kinds is None or job.kind in asked.kinds:
            print(f"{number}: {job}", flush=True)
            played = play(job, folder)
            jobs, faults = jobs + 1, faults + played.faults
            if played.why:
                failed.append(number)
                _tell(asked.seed, number, played)
        if asked.only is not None:
            break
        number += 1
    seconds = round(time.monotonic() - began, 1)
    result = {"seed": asked.seed, "jobs": jobs, "faults": faults, "seconds": seconds, "failed": failed}
    print(json.dumps(result))
    return 1 if failed else 0


def _tell(seed: str, number: int, played: Played) -> None:
    print("\n".join(played.why), flush=True)
    print(f"repeat: python -m tools.chaos --seed {seed} --only {number}", flush=True)
    if played.smaller:
        print(f"shrunk: python -m tests.scenario '{played.smaller}' --as cluster", flush=True)


if __name__ == "__main__":
    sys.exit(main())
