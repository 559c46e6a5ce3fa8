"""A link breaks and nobody dies: it is opened anew; broken again, everybody names the same loser. Hangs on links.

Real ranks under the launcher, real TCP links. The break is made from inside one
of the two processes: both ends notice, or (quietly) only one.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.elastic.observe.events import read_events
from tests.integration.elastic_job import elastic_job, largest_deviation
from tests.integration.launcher_cluster import Cluster

LINKED = """
import json, os, sys, time
import torch, torch.distributed as dist
from megatron.elastic.comm.backend import install
from megatron.elastic.comm.errors import CommError, GenerationChanged, PeerLost
from megatron.elastic.comm.native import NativeFabric
from megatron.elastic.control import env
from megatron.elastic.control.client import WorkerMembership
from megatron.elastic.control.membership import Activity
from megatron.elastic.control.requests import Request

m = WorkerMembership.from_env()
fabric = NativeFabric(m.rank, m.slots, m.incarnation, run_id=os.environ[env.RUN_ID],
                      secret=bytes.fromhex(os.environ[env.SECRET]), transport="tcp", host=os.environ[env.ADDRESS])
install(fabric)
group = fabric.group("dp", range(m.slots))
phase = ["launch"]

def say(event, **fields):
    who = {"event": event, "rank": m.rank, "incarnation": m.incarnation, "pid": os.getpid()}
    os.write(1, json.dumps({**who, **fields}).encode() + b"\\n")

def agree():
    while True:
        try:
            d = m.decide(fabric.address(), "", 100)
            report = fabric.edit(d.generation, d.members, 60)
        except GenerationChanged:
            continue
        say("edited", generation=d.generation, members=list(d.members), opened=report.links_opened,
            lost=[[l.rank, l.cause] for l in d.lost])
        return d

def waits():
    ranks = fabric.waiting_for()
    return Activity(-1, "communication", ranks) if ranks else None

m.start(fabric.interrupt)
m.sample(waits)
d = agree()
"""

BREAKS = """
breaks = {5: False, 10: %(quietly)s} if m.rank == 1 else {}
step = 0
while step < 15:
    m.publish(Activity(step, "step"))
    try:
        if step in breaks and m.incarnation == 0:
            fabric.sever(0, breaks.pop(step))
        total = torch.ones(50_000)
        dist.all_reduce(total, group=group)
        assert bool((total == len(d.members)).all()), total
    except CommError as error:
        if isinstance(error, PeerLost) and not error.heard:
            m.suspect(error.rank, error.why)
        while True:
            try:
                d = agree()
                done = torch.tensor([float(step)])
                dist.all_reduce(done, dist.ReduceOp.MIN, group=group)  # the step some did not finish is done again
                step = int(done)
                break
            except CommError as again:
                if isinstance(again, PeerLost) and not again.heard:
                    m.suspect(again.rank, again.why)
        continue
    step += 1
say("finished", generation=d.generation)
m.finish(0)
"""


def run(tmp_path: Path, body: str) -> Cluster:
    program = tmp_path / "program.py"
    program.write_text(LINKED + body)
    settings = ("--elastic-detection-timeout", "0.3")
    made = Cluster(3, command=[str(program), "--elastic"], options=("--no-respawn",), script_options=settings)
    try:
        assert made.exit_code() == 0, made.text()
        return made
    finally:
        made.close()


@pytest.mark.parametrize("quietly", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_broken_link_is_opened_anew_and_the_second_time_the_same_rank_goes_everywhere(
    tmp_path: Path, quietly: bool
) -> None:
    done = run(tmp_path, BREAKS % {"quietly": quietly})
    first, second = done.of("edited", generation=2), done.of("edited", generation=3)
    assert [sorted(e["members"]) for e in first] == [[0, 1, 2]] * 3 and all(e["lost"] == [] for e in first), done.text()
    assert {e["rank"]: e["opened"] for e in first} == {0: 1, 1: 1, 2: 0}, "one link is opened, no other touched"
    assert {e["lost"][0][0] for e in second} == {1}, f"both ends have one broken link: the higher goes: {done.text()}"
    assert {e["rank"] for e in second} == {0, 2}
    assert all("link broken again" in e["lost"][0][1] for e in second)
    assert {e["rank"] for e in done.of("finished", generation=3)} == {0, 2}
    assert all(e["incarnation"] == 0 for e in done.events)


CHAIN = """
# 0 waits for 1, 1 for 2; 2 sleeps: a little at first, so that it is known how long such a wait takes, then for ever.
for step in range(4):
    m.publish(Activity(step, "step"))
    if m.rank == 2: time.sleep(600 if step == 3 else 0.8)
    row = torch.zeros(1)
    try:
        if m.rank < 2: dist.recv(row, m.rank + 1)
        if m.rank > 0: dist.send(row, m.rank - 1)
    except CommError:
        break
d = agree()
m.finish(0)
"""

DEAF = """
# Nobody waits for anybody; a generation begins, and 2 does not hear of it.
for step in range(20):
    m.publish(Activity(step, "step"))
    time.sleep(0.01)
if m.rank == 2: time.sleep(600)
if m.rank == 0: m.request(Request.REFORM)
d = agree()
m.finish(0)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("body", "cause"), [(CHAIN, "hung in 'step' of step 3"), (DEAF, "no report for generation 2")])
def test_of_a_hang_only_the_rank_that_hangs_is_executed(tmp_path: Path, body: str, cause: str) -> None:
    done = run(tmp_path, body)
    after = done.of("edited", generation=2) or done.of("edited", generation=3)
    assert {e["rank"] for e in after} == {0, 1}, done.text()
    assert all(e["lost"][0][0] == 2 and cause in e["lost"][0][1] for e in after), done.text()
    assert all(e["incarnation"] == 0 for e in done.events)


SEVERED = """
import os
from megatron.elastic.comm.native import NativeFabric

reduce = NativeFabric.reduce_scatter_blocks
calls = 0

def severed(self, *arguments):
    global calls
    calls += 1
    if os.environ["RANK"] == "1" and self.rank == 1 and calls == 4:
        print("rank 1 breaks its link to rank 3", flush=True)
        self.sever(3)
    return reduce(self, *arguments)

NativeFabric.reduce_scatter_blocks = severed
import pretrain_gpt
pretrain_gpt.main()
"""


@pytest.mark.slow
def test_training_goes_on_over_a_link_that_was_opened_anew(tmp_path: Path) -> None:
    script = tmp_path / "severed.py"
    script.write_text(SEVERED)
    flags = ("--elastic-transport", "tcp")
    whole = elastic_job(tmp_path / "whole", 4, 1, 1, 6, *flags)
    broken = elastic_job(tmp_path / "broken", 4, 1, 1, 6, *flags, script=script)
    assert whole.code == 0 and broken.code == 0, broken.output[-6000:]
    assert "breaks its link" in broken.output
    assert broken.of("recovery") and not broken.of("loss"), "a generation with the same members"
    assert all(record.fields["lost_steps"] == 0 for record in broken.of("recovery"))
    assert largest_deviation(whole.committed, broken.committed) < 1e-5
    assert {record.incarnation for record in read_events(tmp_path / "broken")} == {0}
