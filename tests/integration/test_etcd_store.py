"""With its store in etcd a job has no agent that it cannot lose."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from megatron.elastic.control import env
from megatron.elastic.control.etcd import Etcd, EtcdStore
from megatron.elastic.control.store import StoreLost
from tests.integration.elastic_job import ROOT
from tests.integration.etcd_server import EtcdServer, etcd_server
from tests.integration.launcher_cluster import cluster


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    with etcd_server(tmp_path_factory.mktemp("etcd")) as running:
        yield running


def opened(server: EtcdServer, job: str) -> EtcdStore:
    return EtcdStore.open(Etcd.parse(server.endpoint, {}), f"elastic/{job}/")


def test_of_many_that_create_a_key_one_wins_and_all_learn_who(server: EtcdServer) -> None:
    stores = [opened(server, "race") for _ in range(4)]
    seen: list[bytes] = []
    threads = [
        threading.Thread(target=lambda s=store, n=number: seen.append(s.create("place", b"%d" % n)))
        for number, store in enumerate(stores)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(seen) == 4 and len(set(seen)) == 1
    assert stores[0].get("place") == seen[0] and stores[0].get("nothing") is None
    stores[1].delete("place")
    stores[1].delete("place")
    assert stores[0].get("place") is None and stores[2].create("place", b"new") == b"new"
    for store in stores:
        store.close()


def test_of_many_that_replace_a_value_those_who_saw_another_one_do_not(server: EtcdServer) -> None:
    store = opened(server, "replace")
    assert store.replace("kept", None, b"1") and not store.replace("kept", None, b"2")
    assert store.replace("kept", b"1", b"2") and not store.replace("kept", b"1", b"3") and store.get("kept") == b"2"
    assert store.replace("kept", b"1", b"2"), "asked again after an answer that was lost"
    store._ask(lambda client: store._lease(client).revoke())
    assert opened(server, "replace").get("kept") is None, "it hangs on the job's lease"
    store.close()


def test_many_values_are_read_at_once_whether_they_exist_or_not(server: EtcdServer) -> None:
    store = opened(server, "many")
    names = [f"lease/{number}" for number in range(300)]
    for name in names[::7]:
        store.put(name, name.encode())
    assert store.get_many(names) == {name: name.encode() if name in names[::7] else None for name in names}
    assert store.get_many([]) == {}
    store.close()


def test_a_wait_ends_when_the_key_comes_or_the_time_is_up(server: EtcdServer) -> None:
    store = opened(server, "wait")
    assert store.wait("never", 0.2) is None
    writer = threading.Timer(0.3, lambda: store.clone().put("late", b"here"))
    writer.start()
    assert store.clone().wait("late", 30) == b"here"
    assert store.wait("late", 0.0) == b"here"
    store.put("later", b"too")
    assert store.wait_many(["late", "later", "never"], 30) == [b"here", b"too"]
    assert store.wait_many(["never", "late"], 0.2) == []
    store.close()


def test_nothing_of_a_job_outlives_the_lease_of_its_agents(server: EtcdServer) -> None:
    first = opened(server, "lease")
    second = opened(server, "lease")
    assert first.create("journal/0", b"a") == b"a" == second.get("journal/0")
    first._ask(lambda client: first._lease(client).revoke())
    assert second.get("journal/0") is None
    with pytest.raises(StoreLost, match="lease"):
        second.put("journal/1", b"b")
    anew = opened(server, "lease")
    assert anew.create("journal/0", b"c") == b"c"
    for store in (first, second, anew):
        store.close()


def test_an_endpoint_that_does_not_answer_is_passed_over_and_none_is_said(server: EtcdServer) -> None:
    both = Etcd.parse(f"127.0.0.1:9,{server.endpoint}", {})
    store = EtcdStore.open(both, "elastic/endpoints/")
    assert store.create("a", b"1") == b"1"
    store.close()
    with pytest.raises(StoreLost, match=r"etcd at 127.0.0.1:9: "):
        EtcdStore.open(Etcd.parse("127.0.0.1:9", {}), "elastic/endpoints/")


QUOTA = ("--quota-backend-bytes", str(2 << 20))


def test_a_full_etcd_is_named_with_the_flags_that_keep_it_from_filling(tmp_path: Path) -> None:
    with etcd_server(tmp_path, *QUOTA) as own:
        store = EtcdStore.open(Etcd.parse(own.endpoint, {}), "elastic/full/", patience=0)
        store._patience = 0.0
        with pytest.raises(StoreLost, match=r"database is full .* --auto-compaction-mode=periodic"):
            for number in range(200):
                store.put("lease/0", bytes([number]) * (32 << 10))
        store.close()


def test_the_flags_of_the_manifest_keep_etcd_from_filling(tmp_path: Path) -> None:
    """With a retention of 1 s in place of its 5 min, and 3 MiB of renewals for a quota of 2 MiB."""
    documents = yaml.safe_load_all((ROOT / "scripts" / "kubernetes" / "etcd.yaml").read_text(encoding="utf-8"))
    members = next(one for one in documents if one["kind"] == "StatefulSet")
    command = members["spec"]["template"]["spec"]["containers"][0]["command"]
    flags = [flag.replace("=5m", "=1s") for flag in command if flag.startswith("--auto-compaction")]
    with etcd_server(tmp_path, *QUOTA, *flags) as own:
        store = EtcdStore.open(Etcd.parse(own.endpoint, {}), "elastic/compacted/")
        for number in range(1000):
            store.put("lease/0", bytes([number % 256]) * (3 << 10))
            time.sleep(0.005)
        store.close()


def test_an_etcd_that_never_compacts_is_warned_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with etcd_server(tmp_path) as own:
        store = EtcdStore.open(Etcd.parse(own.endpoint, {}), "elastic/warned/")
        assert store.never_compacted() == "", "it has few revisions"
        monkeypatch.setattr("megatron.elastic.control.etcd._MANY_REVISIONS", 20)
        for number in range(30):
            store.put("lease/0", b"%d" % number)
        assert "--auto-compaction-mode=periodic" in store.never_compacted()
        store._ask(lambda client: client.post(client.get_url("/kv/compaction"), json={"revision": 25}))
        assert store.never_compacted() == ""
        store.close()


def test_an_etcd_that_asks_for_a_user_is_told_from_the_environment(tmp_path: Path) -> None:
    named = {env.ETCD_USER: "root", env.ETCD_PASSWORD: "a password"}
    with etcd_server(tmp_path) as own:
        for path, body in (
            ("user/add", {"name": "root", "password": "a password"}),
            ("user/grant", {"user": "root", "role": "root"}),
            ("enable", {}),
        ):
            text = json.dumps(body).encode()
            with urllib.request.urlopen(f"http://{own.endpoint}/v3/auth/{path}", text, timeout=20) as answer:
                assert answer.status == 200
        store = EtcdStore.open(Etcd.parse(own.endpoint, {}, named), "elastic/asked/")
        assert store.create("a", b"1") == b"1"
        store._client().session.headers["Authorization"] = "forgotten"
        assert store.get("a") == b"1", "a token that etcd has forgotten is asked for anew"
        with pytest.raises(StoreLost, match="authentication failed"):
            EtcdStore.open(Etcd.parse(own.endpoint, {}, {**named, env.ETCD_PASSWORD: "wrong"}), "elastic/asked/")
        with pytest.raises(StoreLost, match="user name is empty"):
            EtcdStore.open(Etcd.parse(own.endpoint, {}), "elastic/asked/")
        assert "a password" not in repr(store._etcd) + str(store._etcd)
        store.close()


def test_the_job_goes_on_without_its_first_agent_which_then_comes_back(server: EtcdServer) -> None:
    where = ("--rdzv-backend", "etcd", "--rdzv-endpoint", server.endpoint)
    with cluster(1, nodes=3, options=where, script_options=("--seconds", "6000")) as job:
        job.wait_members([0, 1, 2])
        survivors = [job.pid(rank) for rank in (1, 2)]
        job.agents[0].kill()
        generation = job.wait_members([1, 2], minimum=2)
        job.start_agent(0)
        job.wait_members([0, 1, 2], minimum=generation + 1)
        assert [job.pid(rank) for rank in (1, 2)] == survivors
        os.kill(job.agents[1].pid, signal.SIGTERM)
        assert [job.exit_code(node) for node in (0, 1, 2)] == [3, 3, 3]


@pytest.mark.slow
def test_launchers_that_were_all_killed_and_are_started_at_once_begin_a_new_run(server: EtcdServer) -> None:
    where = ("--rdzv-backend", "etcd", "--rdzv-endpoint", server.endpoint)
    script = ("--seconds", "6000", "--elastic-detection-timeout", "0.5")
    with cluster(1, nodes=2, options=where, script_options=script) as job:
        job.wait_members([0, 1])
        before = {job.pid(rank) for rank in (0, 1)}
        for agent in job.agents.values():
            agent.kill()
        assert not job.survivors()
        job.events.clear()
        for node in (0, 1):
            job.start_agent(node)
        job.wait_text("to forget an earlier run of this job")
        job.wait_members([0, 1])
        assert not before & {job.pid(rank) for rank in (0, 1)}
        os.kill(job.agents[1].pid, signal.SIGTERM)
        assert [job.exit_code(node) for node in (0, 1)] == [3, 3]


@pytest.mark.slow
def test_the_end_of_etcd_ends_the_job_with_one_line(tmp_path: Path) -> None:
    with etcd_server(tmp_path) as own:
        where = ("--rdzv-backend", "etcd", "--rdzv-endpoint", own.endpoint)
        with cluster(1, nodes=2, options=where, script_options=("--seconds", "6000")) as job:
            job.wait_members([0, 1])
            own.end()
            assert [job.exit_code(node) for node in (0, 1)] == [4, 4]
            job.wait_text(f"etcd at {own.endpoint} cannot be reached")


def test_what_the_flags_must_say() -> None:
    with pytest.raises(ValueError, match="--rdzv-endpoint takes HOST:PORT"):
        Etcd.parse("nowhere", {})
    with pytest.raises(ValueError, match="protocol"):
        Etcd.parse("here:1", {"protocol": "ftp"})
    with pytest.raises(ValueError, match="ca_cert=/nowhere: there is no such file"):
        Etcd.parse("here:1", {"ca_cert": "/nowhere"})
    with pytest.raises(ValueError, match=env.ETCD_PASSWORD):
        Etcd.parse("here:1", {}, {env.ETCD_USER: "me"})
    assert Etcd.parse("a:1,[::1]:2", {}).endpoints == (("a", 1), ("::1", 2))
