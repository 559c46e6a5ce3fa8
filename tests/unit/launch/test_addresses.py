"""The address that a node announces, where its own name is a loopback address as many systems have it."""

from __future__ import annotations

import secrets
import socket
import sys
from typing import Any

import pytest

from megatron.elastic.control import env
from megatron.elastic.launch.agent import addresses
from megatron.elastic.launch.agent.addresses import check_reachable, is_loopback, own_address
from megatron.elastic.launch.arguments import BadCommand, JobSpec, parse

OWN = "own-name.example"


@pytest.fixture(autouse=True)
def own_name_is_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine's hosts file is Debian's."""
    resolve = socket.getaddrinfo

    def with_own_name(host: str, *rest: Any, **more: Any) -> Any:
        return resolve("127.0.1.1" if host == OWN else host, *rest, **more)

    monkeypatch.setattr(socket, "getaddrinfo", with_own_name)


def job(*options: str) -> JobSpec:
    command = ["--nnodes", "2", "--nproc-per-node", "1", *options, sys.modules[__name__].__file__ or ""]
    return parse(command, {env.SECRET: secrets.token_hex(16)})


def test_a_node_whose_own_name_is_a_loopback_address_announces_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(addresses, "_outward", lambda: iter(["10.77.0.1", "10.78.0.1"]))
    assert own_address(job("--master-addr", OWN)) == "10.77.0.1"
    assert own_address(job("--master-addr", OWN, "--local-addr", "10.79.0.1")) == "10.79.0.1"
    assert own_address(job("--master-addr", "127.0.0.1")) == "127.0.0.1", "all nodes are on this machine"
    monkeypatch.setattr(addresses, "_outward", lambda: iter(()))
    assert is_loopback(own_address(job("--master-addr", OWN))), "there is no network"


def test_the_addresses_of_this_machine_that_are_taken_instead_are_its_own() -> None:
    for address in addresses._outward():
        assert not is_loopback(address) and addresses.is_local(address)


def test_loopback_addresses_among_others_are_refused_by_naming_the_node_and_the_flag() -> None:
    check_reachable({0: "10.77.0.1", 1: "10.77.0.2"})
    check_reachable({0: "127.0.0.1", 1: "127.0.1.1", 2: "::1"})
    with pytest.raises(BadCommand, match=r"node 1 announces the loopback address ::1.*node 1 with --local-addr") as one:
        check_reachable({0: "10.77.0.1", 1: "::1"})
    assert "\n" not in str(one.value)


def test_a_name_that_cannot_be_resolved_is_named_with_its_flag() -> None:
    with pytest.raises(BadCommand, match=r"--master-addr \(--rdzv-endpoint\) no-such\.invalid cannot be resolved"):
        own_address(job("--master-addr", "no-such.invalid"))
    with pytest.raises(BadCommand, match=r"--local-addr no-such\.invalid cannot be resolved"):
        own_address(job("--master-addr", "127.0.0.1", "--local-addr", "no-such.invalid"))
