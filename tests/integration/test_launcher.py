"""The launcher with real processes and real kills, without training (workers run the rehearsal loop)."""

from __future__ import annotations

import os
import signal
import time

import pytest

from megatron.elastic.control.answers import RankStatus
from megatron.elastic.control.requests import Admit, Status
from megatron.elastic.ctl import ask
from tests.integration.launcher_cluster import cluster

ALL = list(range(8))


def test_a_killed_worker_touches_no_other_and_comes_back() -> None:
    with cluster(8, script_options=("--seconds", "600")) as job:
        job.wait_members(ALL)
        before = {rank: job.pid(rank) for rank in ALL}
        job.kill(3)
        back = job.wait_members(ALL, minimum=3)
        shrunk = [e for e in job.of("decided") if e["reason"] == "loss"]
        assert {e["rank"] for e in shrunk} == set(ALL) - {3}
        assert all(e["lost"] == [[3, 0, "signal SIGKILL"]] for e in shrunk)
        joined = job.of("decided", generation=back)
        assert {e["rank"] for e in joined} == set(ALL) and all(e["joined"] == [3] for e in joined)
        assert job.of("begin", rank=3)[-1]["incarnation"] == 1
        assert {rank: job.pid(rank) for rank in ALL if rank != 3} == {r: p for r, p in before.items() if r != 3}
        os.kill(job.agents[0].pid, signal.SIGTERM)
        assert job.exit_code() == 3
        assert {e["rank"] for e in job.of("drained")} == set(ALL)


@pytest.mark.parametrize("step_seconds", [0.5, 600.0])
def test_a_successor_starts_when_the_others_have_finished_the_step_or_have_had_time_to(step_seconds: float) -> None:
    timeout = "20" if step_seconds < 1 else "0.5"
    options = ("--seconds", "600", "--step-seconds", str(step_seconds), "--elastic-detection-timeout", timeout)
    with cluster(2, script_options=options) as job:
        job.wait_members([0, 1])
        job.kill(1)
        job.wait(lambda: bool(job.of("begin", rank=1, incarnation=1)), "started again")
        begun = job.of("begin", rank=1, incarnation=1)[0]["time"]
        alone = job.of("decided", rank=0, generation=2)
        if step_seconds < 1:
            assert alone and begun - alone[0]["time"] >= step_seconds
        else:
            assert not alone, "rank 0 is in its step still"


def test_a_stopped_worker_is_executed_and_replaced() -> None:
    with cluster(8, script_options=("--seconds", "600")) as job:
        job.wait_members(ALL)
        job.kill(1, signal.SIGSTOP)
        job.wait_members(ALL, minimum=2)
        lost = [e["lost"] for e in job.of("decided") if e["reason"] == "loss"]
        assert lost and all(entry == [[1, 0, "stopped"]] for entry in lost)


def test_a_second_loss_during_recovery_is_a_generation_of_its_own() -> None:
    options = ("--seconds", "600", "--report-seconds", "1.0", "--elastic-no-respawn")
    with cluster(8, script_options=options) as job:
        job.wait_members(ALL)
        job.kill(0)
        job.wait(lambda: len(job.of("freeze", generation=2)) == 7, "everybody frozen")
        job.kill(5)
        job.wait_members([1, 2, 3, 4, 6, 7], minimum=3)
        assert not job.of("decided", generation=2), "generation 2 must not be decided with a dead member"
        assert all(
            e["lost"] == [[0, 0, "signal SIGKILL"], [5, 0, "signal SIGKILL"]] for e in job.of("decided", generation=3)
        )


def test_losing_an_agent_with_its_workers_and_starting_it_again() -> None:
    with cluster(4, nodes=2, script_options=("--seconds", "600")) as job:
        job.wait_members(ALL)
        job.kill(6)
        job.wait_members(ALL, minimum=2)
        theirs = [job.pid(rank) for rank in (4, 5, 6, 7)]
        survivors = {rank: job.pid(rank) for rank in (0, 1, 2, 3)}
        job.agents[1].kill()
        generation = job.wait_members([0, 1, 2, 3], minimum=3)
        lost = job.of("decided", generation=generation)[0]["lost"]
        assert [entry[0] for entry in lost] == [4, 5, 6, 7]
        assert all("node unreachable" in entry[2] for entry in lost)
        job.start_agent(1)
        job.wait_members(ALL, minimum=generation + 1)
        assert {rank: job.pid(rank) for rank in survivors} == survivors
        assert not set(theirs) & {job.pid(rank) for rank in (4, 5, 6, 7)}


def test_a_node_that_loses_ranks_more_often_than_the_others_is_left_out_until_it_is_admitted() -> None:
    with cluster(2, nodes=2, script_options=("--seconds", "600", "--elastic-quarantine-after", "2")) as job:
        job.wait_members([0, 1, 2, 3])
        back = 1
        for rank in (1, 3, 3):  # twice on one node, once on the other: within bounds
            job.kill(rank)
            back = job.wait_members([0, 1, 2, 3], minimum=back + 2)
            time.sleep(1.1)  # what is lost within a second counts once
        job.kill(2)
        out = job.wait_members([0, 1, 3], minimum=back + 1)
        assert all(e["left_out"] == [1] for e in job.of("decided", generation=out)), "its other rank goes on"
        assert job.text().count("node 1 (") == 1 and "lost ranks more often than the others, 3 times" in job.text()
        status = ask(job.run_id, 0, Status())
        assert status.nodes[1].out_s > 0 and status.nodes[0].out_s == 0
        assert status.ranks[2] == RankStatus("lost", incarnation=0, returns=False)
        ask(job.run_id, 0, Admit((2,)))
        job.wait_members([0, 1, 2, 3], minimum=out + 1)


def test_the_end_of_the_store_holding_agent_ends_the_job_with_one_line() -> None:
    with cluster(2, nodes=2, script_options=("--seconds", "600")) as job:
        job.wait_members([0, 1, 2, 3])
        job.agents[0].kill()
        assert job.exit_code(1) == 4
        assert job.text().count("which holds the store, cannot be reached") == 1
        assert not job.survivors()
        assert "Traceback" not in job.text()


def test_sigkill_of_the_launcher_leaves_nothing() -> None:
    with cluster(4, script_options=("--seconds", "600")) as job:
        job.wait_members([0, 1, 2, 3])
        job.agents[0].kill()
        job.agents[0].wait()
        assert not job.survivors()
        assert job.port_is_free()


def test_a_job_that_lost_every_worker_starts_anew() -> None:
    with cluster(3, script_options=("--seconds", "600")) as job:
        job.wait_members([0, 1, 2])
        for rank in (0, 1, 2):
            job.kill(rank)
        generation = job.wait_members([0, 1, 2], minimum=2)
        assert all(e["reason"] == "start" for e in job.of("decided", generation=generation))
