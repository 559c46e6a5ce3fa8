"""One contract, every fabric: gloo, and native over shared memory and TCP.

Each claim is a function of ``collective_checks.py``, ``membership_checks.py`` or ``transfer_checks.py``, run by four
real processes.
"""

from __future__ import annotations

import importlib.util
import logging
import resource
from collections.abc import Callable

import pytest
import torch

from megatron.elastic.comm.backend import install, make_fabric
from megatron.elastic.comm.fabric import Fabric
from megatron.elastic.config import ElasticConfig
from tests.unit.comm import collective_checks, fabric_checks, membership_checks, transfer_checks
from tools.bench._common import Here, Ranks

NATIVE = importlib.util.find_spec("megatron.elastic.comm.native") is not None
KINDS = {
    "gloo": ElasticConfig(comm="gloo"),
    "shm": ElasticConfig(comm="elastic", transport="shm"),
    "tcp": ElasticConfig(comm="elastic", transport="tcp"),
}
SECRET = b"contract"
CHECKS = (*collective_checks.CHECKS, *membership_checks.CHECKS, *transfer_checks.CHECKS)


def build(kind: str, here: Here, incarnation: int = 0) -> Fabric:
    return make_fabric(
        KINDS[kind], here.rank, here.size, incarnation, f"contract{here.port}", SECRET, here.store, timeout=20.0
    )


def run(kind: str, check: Callable[..., None], replacing: bool = False, lost: int | None = None) -> None:
    """``lost``: the rank that ends in the check."""
    if kind != "gloo" and not NATIVE:
        pytest.skip("the native core is not built")

    def body(here: Here) -> None:
        fabric = build(kind, here)
        install(fabric)
        fabric_checks.edit(here, fabric, fabric_checks.WORLD, 1)
        if replacing:
            check(here, fabric, lambda incarnation: build(kind, here, incarnation))
        else:
            check(here, fabric)
        here.tell("passed")
        here.ask()
        fabric.close()

    with Ranks(4, body, seconds=60) as ranks:
        for rank in range(4):
            assert ranks.hear(rank) == "passed"
        left = [rank for rank in range(4) if rank != lost]
        for rank in left:
            ranks.say(rank, "close")
        ranks.results(left)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("kind", KINDS)
def test_contract(kind: str, check: fabric_checks.Check) -> None:
    run(kind, check)


@pytest.mark.parametrize("check", membership_checks.REPLACING_CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("kind", KINDS)
def test_replacing_contract(kind: str, check: Callable[..., None]) -> None:
    run(kind, check, replacing=True)


@pytest.mark.parametrize("kind", KINDS)
def test_alone_before_the_first_edit(kind: str) -> None:
    """A newcomer runs Megatron's prelude in a world of one at nominal sizes."""
    if kind != "gloo" and not NATIVE:
        pytest.skip("the native core is not built")

    def alone(here: Here) -> None:
        fabric = make_fabric(KINDS[kind], 2, 4, 1, f"alone{here.port}", SECRET, here.store, timeout=20.0)
        install(fabric)
        membership_checks.alone(fabric)
        fabric.close()

    with Ranks(1, alone) as ranks:
        ranks.hear(0)


@pytest.mark.parametrize(
    "check", [*membership_checks.ORDERED_CHECKS, *transfer_checks.LINK_CHECKS], ids=lambda check: check.__name__
)
@pytest.mark.parametrize("kind", ["shm", "tcp"])
def test_ordered_contract(kind: str, check: fabric_checks.Check) -> None:
    run(kind, check)


@pytest.mark.parametrize("check", transfer_checks.LOAN_CHECKS, ids=lambda check: check.__name__)
def test_loan(check: fabric_checks.Check) -> None:
    run("shm", check)


@pytest.mark.parametrize("check", transfer_checks.LOSING_CHECKS, ids=lambda check: check.__name__)
def test_loan_and_loss(check: fabric_checks.Check) -> None:
    run("shm", check, lost=transfer_checks.LOSING_CHECKS[check])


def test_dead_members_can_still_be_named() -> None:
    membership_checks.living_ranks_table()


def test_where_files_are_limited_messages_are_copied_and_one_line_says_so() -> None:
    def body(here: Here) -> list[str]:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 40, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
        said: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger("megatron.elastic.comm.native").addHandler(handler)
        fabric = build("shm", here)
        install(fabric)
        fabric_checks.edit(here, fabric, range(2), 1)
        transfers, got = fabric.transfers(fabric.group("mirror", range(2)), 1), torch.zeros(1000)
        transfers.receive([got], [1 - here.rank])
        transfers.send(fabric.lendable(1000).fill_(here.rank), 1 - here.rank)
        assert transfers.wait() == [0] and transfers.loan(0) is None and bool((got == 1 - here.rank).all())
        assert not fabric.on_loan(fabric.lendable(1000).data_ptr())
        here.exchange("done", True, range(2))
        fabric.close()
        return said

    with Ranks(2, body) as ranks:
        for said in ranks.results(range(2)).values():
            assert len(said) == 1 and "ulimit -f" in said[0]
