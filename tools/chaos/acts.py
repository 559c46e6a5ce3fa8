"""The functions that play a job of each kind."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from tests.chaos.wire import Quality, wire
from tests.cluster.history import drawn as drawn_scenario
from tests.cluster.history import rules_of, shrunk
from tests.integration.elastic_job import elastic_job
from tests.integration.kill_walk import DROPOUT, RATES
from tests.integration.test_broken_links import SEVERED
from tests.integration.test_two_hosts import address, namespaces, running, why_not
from tests.scenario import in_job
from tools.chaos.jobs import Job
from tools.chaos.nodes import play_nodes, wait_until_whole
from tools.chaos.outside import play_outside
from tools.chaos.reference import Played

__all__ = ["ACTS", "Act"]

CUT = Quality(lost=1.0)
NETWORKS = {
    "late": Quality(delay=0.02, jitter=0.01),
    "losing packets": Quality(lost=0.03),
    "changing bits": Quality(changed=0.03),
    "cut": CUT,
}
"""States of the network between two hosts."""


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


def _hosts(job: Job, folder: Path, played: Played) -> None:
    why = why_not()
    if why:
        print(f"  not played: {why}", flush=True)
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
                wait_until_whole(2, folder, began)
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
    "outside": play_outside,
    "nodes": play_nodes,
    "hosts": _hosts,
    "links": _links,
}
