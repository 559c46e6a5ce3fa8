"""The worker's end of the control plane.

One thread listens on the socket this worker inherited from its node's agent.
FREEZE reaches the worker there: the thread notes the generation, calls
``on_freeze`` and wakes whoever waits in :meth:`WorkerMembership.decide`. The
thread also fences: when the agent is gone, or when the agent's lease (a word in
shared memory) has run out, this process and its children end at once, before
anybody else may believe them dead.

What a worker says is ordered by the socket; what it does is published in shared
memory (:mod:`megatron.elastic.control.slot`), where the agent can read it also
when the worker is stopped or dead.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace

from megatron.elastic.comm.errors import CommTimeout, GenerationChanged
from megatron.elastic.comm.fabric import Address
from megatron.elastic.control import env
from megatron.elastic.control.membership import Activity, Decision, Loss, Released
from megatron.elastic.control.slot import Slot
from megatron.elastic.control.wire import (
    FrameReader,
    Message,
    ProtocolError,
    address_from_json,
    address_to_json,
    as_object,
    decision_from_json,
    encode,
    take_int,
    take_list,
    take_str,
)

__all__ = ["NotUnderLauncher", "WorkerMembership"]

_LOOK_SECONDS = 0.25
"""How often the control thread looks at the lease and the sampler when nothing arrives."""


class NotUnderLauncher(RuntimeError):
    """This process was not started by the elastic launcher."""

    def __init__(self, missing: str) -> None:
        super().__init__(
            "--elastic needs the elastic launcher: python -m megatron.elastic.launch [torchrun arguments] "
            f"script.py [script arguments] ({missing})"
        )


class WorkerMembership:
    """Implements :class:`megatron.elastic.control.membership.Membership` over the agent's socket."""

    def __init__(self, rank: int, incarnation: int, slots: int, channel: socket.socket, slot: Slot, host: str,
                 newcomer: bool = False, domain: str = "") -> None:  # fmt: skip
        self.rank = rank
        self.incarnation = incarnation
        self.slots = slots
        self.host = host
        """This node's name, for :class:`Address`; two agents on one machine have two."""
        self.domain = domain
        """This node's failure domain, for :class:`Address`."""
        self.newcomer = newcomer
        """The job ran already when this process was started: :meth:`decide` waits to be admitted."""
        self._channel = channel
        self._slot = slot
        self._reader = FrameReader()
        self._sending = threading.Lock()
        self._publishing = threading.Lock()
        self._changed = threading.Condition()
        self._frozen = 0
        self._decided = 0
        self._decision: Decision | None = None
        self._returned = 0
        """Generation of the decision that was last returned."""
        self._overlooked: tuple[Loss, ...] = ()
        self._pending: tuple[str, ...] = ()
        self._released = False
        self._drain_asked = False
        self._on_freeze: Callable[[int], None] | None = None
        self._on_members: Callable[[Mapping[int, Address]], None] | None = None
        self._sampler: Callable[[], Activity | None] | None = None
        self._activity = Activity(-1, "launch")
        self._sampled: Activity | None = None
        self._thread: threading.Thread | None = None
        self._closed = threading.Event()

    @classmethod
    def from_env(cls, environ: Mapping[str, str] = os.environ) -> WorkerMembership:
        """The membership of this process. Raises :class:`NotUnderLauncher` outside the elastic launcher."""
        names = ("RANK", env.SLOTS, env.INCARNATION, env.CONTROL_FD, env.SLOT_FD, env.HOST, env.DOMAIN)
        missing = [name for name in names if name not in environ]
        if missing:
            raise NotUnderLauncher(f"{missing[0]} is not set")
        try:
            channel = socket.socket(fileno=os.dup(int(environ[env.CONTROL_FD])))
            slot = Slot(int(environ[env.SLOT_FD]))
        except (OSError, ValueError) as error:
            raise NotUnderLauncher(f"its socket is not inherited: {error}") from None
        rank, incarnation, slots = int(environ["RANK"]), int(environ[env.INCARNATION]), int(environ[env.SLOTS])
        newcomer = environ.get(env.NEWCOMER) == "1"
        return cls(rank, incarnation, slots, channel, slot, environ[env.HOST], newcomer, environ[env.DOMAIN])

    # -- Membership -----------------------------------------------------------

    def start(self, on_freeze: Callable[[int], None]) -> None:
        """See :meth:`Membership.start`. Must be called before :meth:`decide`; once, by the thread that trains."""
        if self._thread is not None:
            raise RuntimeError("WorkerMembership.start was called twice")
        self._slot.hold()
        self._on_freeze = on_freeze
        self._thread = threading.Thread(target=self._listen, name="elastic-control", daemon=True)
        self._thread.start()
        self._send({"t": "hello"})

    def frozen(self) -> int:
        """See :meth:`Membership.frozen`."""
        return self._frozen

    def decide(self, address: Address, report: str, timeout: float) -> Decision:
        """See :meth:`Membership.decide`.

        Raises ``CommTimeout`` after ``timeout`` seconds, ``Released`` when this rank was asked to leave and the
        others go on without it.
        """
        if self._thread is None:
            raise RuntimeError("call start() before decide()")
        end = time.monotonic() + timeout
        with self._changed:
            known = self._returned
            # In quiet times for the next generation, whatever it will be about: this thread holds the same until then.
            promised = 0 if self._decided == 0 else max(self._frozen, known + 1)
        # The node's name and domain; where a transport listens is in its endpoint.
        here = address_to_json(replace(address, host=self.host, domain=self.domain))
        self._send({"t": "report", "g": promised, "address": here, "report": report})
        with self._changed:
            while True:
                if self._released:
                    raise Released
                if self._decided > known and self._decision is not None and self._decided == self._frozen:
                    self._returned = self._decided
                    return self._decision
                # Who waits to be admitted is not concerned by generations it was not decided into.
                if self._frozen > promised and self._decided > 0:
                    raise GenerationChanged(self._frozen)
                left = end - time.monotonic()
                if left <= 0:
                    raise CommTimeout(timeout)
                self._changed.wait(left)

    def overlooked(self) -> tuple[Loss, ...]:
        """See :meth:`Membership.overlooked`."""
        with self._changed:
            losses, self._overlooked = self._overlooked, ()
        return losses

    def suspect(self, rank: int, why: str) -> None:
        """See :meth:`Membership.suspect`."""
        self._send({"t": "suspect", "rank": rank, "g": self._frozen, "why": why})

    def publish(self, activity: Activity) -> None:
        """See :meth:`Membership.publish`."""
        with self._publishing:
            self._activity = activity
            self._slot.publish(activity)

    def pending(self) -> tuple[str, ...]:
        """See :meth:`Membership.pending`."""
        return self._pending

    def request(self, what: str) -> None:
        """See :meth:`Membership.request`."""
        self._send({"t": "request", "what": what, "g": self._decided})

    def announce(self, text: str) -> None:
        """See :meth:`Membership.announce`."""
        self._send({"t": "tolerance", "g": self._decided, "text": text})

    def drain(self) -> None:
        """See :meth:`Membership.drain`. Only leaves word for the control thread: a signal handler may call it."""
        self._drain_asked = True

    def give_up(self, code: int, why: str) -> None:
        """See :meth:`Membership.give_up`."""
        self._send({"t": "give_up", "code": code, "why": why})

    def finish(self, code: int) -> None:
        """See :meth:`Membership.finish`."""
        self._slot.finish(code)
        self._send({"t": "finish", "code": code})

    # -- beyond the protocol ---------------------------------------------------

    def sample(self, sampler: Callable[[], Activity | None]) -> None:
        """Have the control thread publish ``sampler()`` a few times a second, when it returns something new.

        For waits inside native code, during which nobody else could publish whom
        this process waits for; None when it waits for nobody, which shows what was
        published last again. A step below 0 stands for the one published last. Must
        be quick and must not take locks of the caller.
        """
        self._sampler = sampler

    def watch_members(self, on_members: Callable[[Mapping[int, Address]], None]) -> None:
        """While this process waits to be admitted, hear who the members are, and again when that changes.

        ``on_members`` runs on the control thread and must return at once.
        """
        self._on_members = on_members

    def close(self) -> None:
        """Stop listening, and with it fencing: for a process that outlives its membership. Idempotent."""
        self._closed.set()
        self._channel.shutdown(socket.SHUT_RD)

    # -- the control thread ------------------------------------------------------

    def _listen(self) -> None:
        poll = select.poll()
        poll.register(self._channel, select.POLLIN)
        while not self._closed.is_set():
            arrived = poll.poll(_LOOK_SECONDS * 1000)
            if self._closed.is_set():
                return
            self.fence()
            if self._drain_asked:
                self._drain_asked = False
                self._send({"t": "drain"})
            if arrived:
                self._receive()
            elif self._sampler is not None:
                self._sample(self._sampler())

    def _sample(self, sampled: Activity | None) -> None:
        with self._publishing:
            published = self._activity
            if sampled is not None and sampled.step < 0:
                sampled = Activity(published.step, sampled.phase, sampled.waiting_for)
            if sampled != self._sampled:
                self._sampled = sampled
                self._slot.publish(published if sampled is None else sampled)

    def _receive(self) -> None:
        try:
            data = self._channel.recv(1 << 20)
        except OSError:
            data = b""
        if not data:
            _end_with_children("the agent of this node is gone")
        try:
            for message in self._reader.feed(data):
                self._handle(message)
        except ProtocolError as error:
            _end_with_children(f"garbage from the agent: {error}")

    def _handle(self, message: Message) -> None:
        kind = take_str(message, "t")
        if kind == "freeze":
            self._freeze(take_int(message, "g"))
        elif kind == "decision":
            decision = decision_from_json(as_object(message.get("decision")))
            with self._changed:
                if self._decision is not None and self._decided > self._returned:
                    self._overlooked += self._decision.lost
                self._decision, self._decided = decision, decision.generation
                self._frozen = max(self._frozen, decision.generation)
                self._changed.notify_all()
        elif kind == "members":
            if self._on_members is not None:
                found = [address_from_json(as_object(item)) for item in take_list(message, "members")]
                self._on_members({address.rank: address for address in found})
        elif kind == "pending":
            self._pending = tuple(str(item) for item in take_list(message, "what"))
        elif kind == "released":
            with self._changed:
                self._released = True
                self._changed.notify_all()
        elif kind == "end":
            sys.stdout.flush()
            print(f"rank {self.rank}: {take_str(message, 'why')}", file=sys.stderr, flush=True)
            os._exit(take_int(message, "code"))

    def _freeze(self, generation: int) -> None:
        if generation <= self._frozen:
            return
        with self._changed:
            self._frozen = generation
        # The callback first: it wakes communication; whoever waits in decide() is not in a hurry.
        if self._on_freeze is not None:
            self._on_freeze(generation)
        with self._changed:
            self._changed.notify_all()

    def fence(self) -> None:
        """See :meth:`Membership.fence`. Any thread."""
        if self._slot.lease_over():
            _end_with_children("the lease of this node ran out: its agent is stopped or cannot reach the others")

    def _send(self, message: Message) -> None:
        data = encode(message)
        with self._sending:
            try:
                self._channel.sendall(data)
            except OSError:
                _end_with_children("the agent of this node is gone")


def _end_with_children(why: str) -> None:
    """End this process and everything it started (its process group) at once; does not return."""
    try:
        os.write(2, f"rank {os.environ.get('RANK', '?')}: {why}; this worker ends\n".encode())
    finally:
        if os.getpgrp() == os.getpid():
            os.killpg(0, signal.SIGKILL)
        os._exit(4)
