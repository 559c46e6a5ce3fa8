"""Messages that are waited for together, and loans of them, as functions run by each of four ranks.

``CHECKS`` are of every fabric, ``LINK_CHECKS`` of native ones, ``LOAN_CHECKS`` and ``LOSING_CHECKS`` of ranks that
share memory.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from random import Random

import torch
import torch.distributed as dist

from megatron.elastic.comm.errors import CommError, GenerationChanged
from megatron.elastic.comm.fabric import Fabric
from megatron.elastic.comm.transfers import Loan, Transfers
from tests.unit.comm.fabric_checks import WORLD, Check, edit, same, values
from tools.bench._common import Here

COUNT = 1 << 18
"""Values of a message: more than a link buffers."""


def taken(transfers: Transfers, expected: int) -> list[int]:
    """Return the numbers of ``expected`` receives in the order in which they came."""
    came: list[int] = []
    while len(came) < expected:
        new = transfers.wait()
        assert new == sorted(new) and new, "a wait ends with something new"
        came += new
    assert transfers.wait() == [] and transfers.come() == []
    return came


def messages_of_all_come_once_and_in_order(here: Here, fabric: Fabric) -> None:
    """Two to each rank, of which one is long; also where they lie in memory that may be lent."""
    group = fabric.group("mirror", WORLD)
    others = [rank for rank in WORLD if rank != here.rank]
    for lends in (False, True):
        transfers = fabric.transfers(group, 5)
        into = [torch.zeros(count) for count in (COUNT, 3) for _ in others]
        transfers.receive(into[: len(others)], others)
        transfers.receive(into[len(others) :], others)
        for turn, count in enumerate((COUNT, 3)):
            for rank in others:
                sent = values(here.rank, count, torch.float32, 10 * rank + turn)
                transfers.send(fabric.lendable(count).copy_(sent) if lends else sent, rank)
        came = taken(transfers, len(into))
        assert sorted(came) == list(range(len(into)))
        loans = [transfers.loan(number) for number in range(len(into))]
        for number, (loan, memory) in enumerate(zip(loans, into, strict=True)):
            turn, other = divmod(number, len(others))
            got = memory if loan is None else loan.values()
            same(got, values(others[other], memory.numel(), torch.float32, 10 * here.rank + turn), (lends, number))
            assert transfers.loan(number) is None, "a loan is handed over once"
        dist.barrier(group=group)


def come_waits_for_nothing(here: Here, fabric: Fabric) -> None:
    group = fabric.group("mirror", WORLD)
    transfers, got = fabric.transfers(group, 6), torch.zeros(COUNT)
    if here.rank == 0:
        transfers.receive([got], [1])
        assert transfers.come() == []
    dist.barrier(group=group)
    if here.rank == 1:
        transfers.send(torch.ones(COUNT), 0)
        assert transfers.wait() == []
    if here.rank == 0:
        while not transfers.come():
            pass
        assert bool((got == 1).all())


def an_edit_ends_a_wait(here: Here, fabric: Fabric) -> None:
    """Rank 3 sends nothing: the others wait until the next generation is decided."""
    transfers = fabric.transfers(fabric.group("mirror", WORLD), 7)
    if here.rank != 3:
        transfers.receive([torch.zeros(COUNT)], [3])
        fabric.interrupt(2)
        try:
            transfers.wait()
        except GenerationChanged as error:
            assert error.generation == 2
        else:
            raise AssertionError("the wait did not end")
    edit(here, fabric, WORLD, 2)
    try:
        transfers.come()
    except CommError:
        pass
    else:
        raise AssertionError("these are messages of another generation")


def sums_are_over_all_ranks_whatever_was_summed_before(here: Here, fabric: Fabric) -> None:
    for count in (3, 5, 5, 3):
        got = fabric.sum_over_ranks([(here.rank + 1) * 2.0**number for number in range(count)], [])
        assert got == ([10 * 2.0**number for number in range(count)], []), (count, got)


def counts_add_up_exactly(here: Here, fabric: Fabric) -> None:
    random = Random(7)
    by_rank = [[0, True, *map(random.getrandbits, range(1, 91))] for _ in WORLD]
    values, got = fabric.sum_over_ranks([0.5], by_rank[here.rank])
    assert (values, got) == ([2.0], [sum(each) for each in zip(*by_rank, strict=True)])
    assert all(type(count) is int for count in got)


def a_receive_with_a_future_is_waited_for(here: Here, fabric: Fabric) -> None:
    """The thread that waits takes the message in, and so runs what the future calls. That may wait for it, too."""
    if here.rank == 0:
        got, ended = torch.zeros(2, 2), []
        work = dist.irecv(got.t(), src=1, tag=3)
        assert work is not None
        future = work.get_future().then(lambda _: ended.append(work.wait()))
        dist.barrier()
        assert work.wait() and work.is_completed()
        same(got, values(1, 4, torch.float32).view(2, 2).t(), "received")
        future.wait()
        assert ended == [True]
    else:
        dist.barrier()
    if here.rank == 1:
        time.sleep(0.3)  # rank 0 waits by now
        dist.send(values(1, 4, torch.float32).view(2, 2), dst=0, tag=3)


def callbacks_of_futures_wait_for_what_is_called_in_them(here: Here, fabric: Fabric) -> None:
    """As those of torch's PowerSGD hook for DDP do, here in four callbacks of which each one begins the next."""
    sums: list[float] = []

    def added_up(depth: int) -> torch.Tensor:
        work = dist.all_reduce(tensor := torch.ones(3), async_op=True)
        future = work.get_future().then(lambda _: added_up(depth - 1) if depth else None)
        future.wait()
        sums.append(float(tensor[0]))
        return tensor

    added_up(4)
    assert sums == 5 * [4.0]


def they_wait_for_what_is_queued_behind(here: Here, fabric: Fabric) -> None:
    """Also those of a message, which end in whichever thread takes it in."""
    seen: list[float] = []
    if here.rank == 3:
        time.sleep(0.2)  # the others have queued everything by then
    tensors = [torch.full((COUNT,), float(number)) for number in range(4)]
    other, received = here.rank ^ 1, torch.zeros(3)
    message = dist.irecv(received, src=other, tag=7)
    assert message is not None
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    futures = [work.get_future() for work in works]

    def look(number: int) -> None:
        futures[-1].wait()
        seen.append(float(tensors[number][0]))

    waiting = [futures[0].then(lambda _: look(0)), futures[1].then(lambda _: look(1))]
    waiting.append(message.get_future().then(lambda _: look(2)))
    sent = dist.isend(values(here.rank, 3, torch.float32), dst=other, tag=7)
    for future in waiting:
        future.wait()
    assert sent is not None and sent.wait() and sorted(seen) == [0.0, 4.0, 8.0]
    same(received, values(other, 3, torch.float32), "received")


CHECKS: tuple[Check, ...] = (
    messages_of_all_come_once_and_in_order,
    sums_are_over_all_ranks_whatever_was_summed_before,
    counts_add_up_exactly,
)
LINK_CHECKS: tuple[Check, ...] = (
    come_waits_for_nothing,
    an_edit_ends_a_wait,
    a_receive_with_a_future_is_waited_for,
    callbacks_of_futures_wait_for_what_is_called_in_them,
    they_wait_for_what_is_queued_behind,
)

# -- loans ---------------------------------------------------------------------


def sent(fabric: Fabric, to: int, salt: int = 0, tag: int = 8) -> torch.Tensor:
    """Send a message from memory that may be lent. Returns the memory."""
    memory = fabric.lendable(COUNT)
    memory.copy_(values(0, COUNT, torch.float32, salt))
    transfers = fabric.transfers(fabric.group("mirror", WORLD), tag)
    transfers.send(memory, to)
    assert transfers.wait() == [], "what is lent has left"
    return memory


def borrowed(fabric: Fabric, source: int = 0, salt: int = 0, tag: int = 8) -> Loan:
    """Receive what ``sent`` sends; nothing may be written where it would have gone."""
    transfers, untouched = fabric.transfers(fabric.group("mirror", WORLD), tag), torch.full((COUNT,), -1.0)
    transfers.receive([untouched], [source])
    assert taken(transfers, 1) == [0]
    loan = transfers.loan(0)
    assert loan is not None and bool((untouched == -1.0).all())
    same(loan.values(), values(0, COUNT, torch.float32, salt), "what is on loan")
    return loan


def one_loan(here: Here, fabric: Fabric) -> tuple[torch.Tensor | None, Loan | None]:
    """Rank 0 lends to rank 1. Returns the memory on the first and the loan on the second."""
    return sent(fabric, 1) if here.rank == 0 else None, borrowed(fabric) if here.rank == 1 else None


def a_loan_outlives_edits_and_ends_once(here: Here, fabric: Fabric) -> None:
    """The lender sees it end; memory of which a loan is left is not handed out again, though its tensor is gone."""
    memory, loan = one_loan(here, fabric)
    where = 0 if memory is None else memory.data_ptr()
    edit(here, fabric, WORLD, 2)
    del memory
    if here.rank == 0:
        assert fabric.on_loan(where)
        others = [fabric.lendable(COUNT).fill_(-5.0) for _ in range(3)]
        assert where not in [other.data_ptr() for other in others]
    dist.barrier()
    if loan is not None:
        same(loan.values(), values(0, COUNT, torch.float32), "what is on loan in a later generation")
        loan.give_back()
        loan.give_back()
        del loan
    dist.barrier()
    dist.barrier()  # takes in what was returned before the first one
    if here.rank == 0:
        assert not fabric.on_loan(where) and fabric.lendable(COUNT).data_ptr() == where, "it is used again"


def a_loan_that_nobody_took_ends_with_its_generation(here: Here, fabric: Fabric) -> None:
    """Both a message that no receive was posted for, and one whose receiver let its transfers go."""
    where = sent(fabric, 1).data_ptr() if here.rank == 0 else 0
    kept = [sent(fabric, 2, tag=9)] if here.rank == 0 else []
    if here.rank == 2:
        transfers = fabric.transfers(fabric.group("mirror", WORLD), 9)
        transfers.receive([torch.zeros(COUNT)], [0])
        assert transfers.wait() == [0]
        del transfers
    dist.barrier()  # rank 1 has taken the first message in, and keeps it
    edit(here, fabric, WORLD, 2)
    for _ in range(2):
        dist.barrier()
    if here.rank == 0:
        assert not fabric.on_loan(where) and not fabric.on_loan(kept[0].data_ptr())


def _end(here: Here) -> None:
    here.tell("passed")
    os.kill(os.getpid(), signal.SIGKILL)


def _ended(pid: int) -> bool:
    """Return whether all threads of a process have ended, though its parent may not have asked for its exit code."""
    try:
        threads = list(Path(f"/proc/{pid}/task").iterdir())
        return len(threads) == 1 and (threads[0] / "stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def the_end_of_a_borrower_ends_its_loans(here: Here, fabric: Fabric) -> None:
    """Rank 3 is killed with a loan; that of rank 1 goes on."""
    memories = {to: sent(fabric, to) for to in (1, 3)} if here.rank == 0 else {}
    loan = borrowed(fabric) if here.rank in (1, 3) else None
    pids = here.exchange("borrowed", os.getpid(), WORLD)
    if here.rank == 3:
        _end(here)
    while not _ended(pids[3]):
        time.sleep(0.001)
    edit(here, fabric, (0, 1, 2), 2)
    if here.rank == 0:
        assert {to: fabric.on_loan(memory.data_ptr()) for to, memory in memories.items()} == {1: True, 3: False}
    if loan is not None:
        same(loan.values(), values(0, COUNT, torch.float32), "what is on loan after a loss")
    dist.barrier()
    del loan


def the_end_of_a_lender_ends_no_loan(here: Here, fabric: Fabric) -> None:
    """Rank 0 is killed. Rank 1 still reads its memory, and can end the loan although its lender is gone."""
    memory, loan = one_loan(here, fabric)
    pids = here.exchange("borrowed", os.getpid(), WORLD)
    if memory is not None:
        _end(here)
    while not _ended(pids[0]):
        time.sleep(0.001)
    edit(here, fabric, (1, 2, 3), 2)
    if loan is not None:
        same(loan.values(), values(0, COUNT, torch.float32), "what a lost rank has lent")
        loan.give_back()
    dist.barrier()


def a_loan_outlives_the_fabric(here: Here, fabric: Fabric) -> None:
    memory, loan = one_loan(here, fabric)
    here.exchange("borrowed", True, WORLD)
    fabric.close()
    here.exchange("closed", True, WORLD)
    if loan is not None:
        same(loan.values(), values(0, COUNT, torch.float32), "what is on loan behind the end of the fabric")
        loan.give_back()
    del memory


def a_forked_process_ends_nothing(here: Here, fabric: Fabric) -> None:
    """It may collect its parent's garbage, as processes that load data do."""
    memory, loan = one_loan(here, fabric)
    where = 0 if memory is None else memory.data_ptr()
    child = os.fork()
    if child == 0:
        if loan is not None:
            loan.give_back()
        del loan, memory
        os._exit(0 if not where or fabric.lendable(COUNT).data_ptr() != where else 1)
    assert os.waitpid(child, 0)[1] == 0, "memory is in use"
    for _ in range(2):
        dist.barrier()
    if memory is not None:
        assert fabric.on_loan(where)
    dist.barrier()
    del loan, memory


def memory_is_cut_and_joined_again(here: Here, fabric: Fabric) -> None:
    """Any order of taking and giving back leaves ranges that do not overlap, and room for as much as before."""
    generator = torch.Generator().manual_seed(2024 + here.rank)
    whole = fabric.lendable(64 * 1024).data_ptr()
    held: dict[int, torch.Tensor] = {}
    for turn in range(400):
        if held and int(torch.randint(2, (), generator=generator)):
            del held[sorted(held)[int(torch.randint(len(held), (), generator=generator))]]
        else:
            memory = fabric.lendable(int(torch.randint(1, 8000, (), generator=generator)))
            memory.fill_(float(turn))
            held[memory.data_ptr()] = memory
        for memory in held.values():
            assert float(memory[0]) == float(memory[-1]) and bool((memory == memory[0]).all()), (turn, "overlap")
    held.clear()
    del memory
    assert fabric.lendable(64 * 1024).data_ptr() == whole
    same(fabric.lendable(0), torch.zeros(0), "nothing")


LOAN_CHECKS: tuple[Check, ...] = (
    a_loan_outlives_edits_and_ends_once,
    a_loan_that_nobody_took_ends_with_its_generation,
    a_loan_outlives_the_fabric,
    a_forked_process_ends_nothing,
    memory_is_cut_and_joined_again,
)
LOSING_CHECKS: dict[Check, int] = {the_end_of_a_borrower_ends_its_loans: 3, the_end_of_a_lender_ends_no_loan: 0}
"""With the rank that is killed."""
