"""A bounded model of the step transaction, explored state by state.

A few ranks own and mirror a few blocks and run a few steps; each takes its
protocol actions (compute, reduce and ship, receive, join the vote, learn its
result, update one block, gather) in any interleaving. A rank may be killed
between any two actions; messages it sent may still arrive or not. A kill leads
to FREEZE, which reaches each survivor at any later time; once all have
reported, DECIDE calls the real ``resolve`` on real ``Holdings`` and each
survivor acts on it in its own time, during which more may be killed.

With ``migrate`` the ranks also agree, once and in any vote, that the next one is to name
another placement (every block gets a new owner on a rank that had no copy). The step of that
next vote is computed and reduced by the old owners and shipped to the copies of the new
placement; each rank takes the copies it is due in its own time, and joins the vote with the
gradients they need. Whoever learns the vote lets go of the copies that leave. Until then a
loss leads back to the old placement, with the copies taken meanwhile besides, or to the vote
taken again.

With ``refuse`` one vote finds a gradient that is not finite: whoever learns that computes the step
again, in the same generation, from other sums.

With ``replenish`` a decision that leaves blocks short of mirrors says where further copies are to be. Either they
can come beside the next step: then the vote of that step names them. Or they cannot: then each rank takes them when
it may, they count for a decision as long as they can do what their rank's other copies can, and the vote after
names them. In both cases no loss of as many ranks as there are mirrors may lose a block from the moment they are there.

What a copy contains is written as its *chain*: the computations whose gradients it
has applied, one per step, each a number made of generation and attempt. Two copies agree
exactly when their chains do.

Two merges keep the state space small without hiding an outcome. Gathering and
computing are one action: reports do not distinguish them, and a kill in between
looks to everyone like one just after. A rank takes all shipped gradients of a step
in one action: with a part of them it reports, and later discards, the same as with
none (not merged where a fault makes the parts matter).

With ``early`` ranks contribute to blocks one after the other, and each block is reduced and shipped as soon as all have
contributed to it, while others are still computed: a mirror may hold a gradient that its rank has not yet contributed
to elsewhere, and so may an owner. No part of this is merged.

With ``state_mode`` mirrors receive stepped blocks after the vote, all ranks wait for that before they gather, and a
loss before may take all back by one version. With ``tears`` an error interrupts an update inside a block: its rank
stops, and all form a new generation. With ``drain`` some vote agrees that the job ends with its step.

Claims checked in every reachable state: see :class:`Violation`. ``Faults`` switch
single rules off, to see that the exploration notices. What happens once a loss is noticed
is :mod:`protocol_decision`, the walk through all states :mod:`protocol_explore`.
"""

from __future__ import annotations

from collections.abc import Iterator

from tests.unit.protocol.protocol_decision import Decisions
from tests.unit.protocol.protocol_state import ATTEMPTS, Decision, Faults, Gradient, Layout, Rank, State

__all__ = ["Model"]


class Model(Decisions):
    """Successors of a state, with the claims asserted on the way."""

    def successors(self, state: State) -> Iterator[tuple[str, State]]:
        """All (action, next state)."""
        dead = sum(not rank.alive for rank in state.ranks)
        if dead > state.seen_dead:
            yield f"freeze {state.freeze + 1}", state._replace(freeze=state.freeze + 1, seen_dead=dead)
        if state.migrations and not dead and state.freeze == state.decided:
            step = max(rank.step for rank in state.ranks)
            if self._open(state, step):
                yield "all are ready", state._replace(migrations=state.migrations - 1, ready=(state.decided, step))
        if state.drains and not dead and state.freeze == state.decided:
            step = max(rank.step for rank in state.ranks)
            if step < self.setting.steps and self._open(state, step):
                yield "all know of the end", state._replace(drains=0, drained=(state.decided, step))
        yield from self._decide(state, dead)
        for r, rank in enumerate(state.ranks):
            if not rank.alive:
                continue
            if state.kills:
                killed = self._with(state, r, rank._replace(alive=False))
                yield f"kill {r}", killed._replace(kills=state.kills - 1, owed=self._owed(state) - 1)
            if rank.frozen < state.freeze:
                yield f"{r} freezes", self._with(state, r, rank._replace(frozen=state.freeze))
            if rank.frozen == rank.generation:
                yield from self._act(state, r, rank)
            elif state.decided == rank.frozen and state.decision.kind != "lost":
                yield f"{r} adopts", self._adopt(state, r, rank)

    @staticmethod
    def _open(state: State, step: int) -> bool:
        """Return whether no rank has joined the vote on ``step``, the newest under way."""
        return all(rank.step < step or rank.phase in "RS" for rank in state.ranks)

    def is_progress(self, action: str) -> bool:
        """Return whether a job in which nothing but ``action`` can happen goes on: a rank need not be killed."""
        return not action.startswith("kill")

    def _owed(self, state: State) -> int:
        """Losses that may not cost a block here: one less than the copies of the block with fewest.

        Of copies that count whatever becomes of the vote under way: those that it names, and that are there.
        """
        alive = [(r, rank) for r, rank in enumerate(state.ranks) if rank.alive]
        if len(alive) < len(state.decision.members) or any(rank.generation != state.decided for _, rank in alive):
            return state.owed
        blocks = range(self.setting.computing)
        return min(sum(b in dict(k.copies) and r in k.voted_for[b] for r, k in alive) for b in blocks) - 1

    # --- one rank's step ----------------------------------------------------------------------

    def _act(self, state: State, r: int, rank: Rank) -> Iterator[tuple[str, State]]:
        peers = [state.ranks[m] for m in state.decision.members]
        yield from self._take(state, r, rank)
        if rank.phase == "R" and self.setting.early:
            yield from self._reduce_blocks(state, r, rank)
        elif rank.phase == "R" and all(self._past(state.ranks[m], rank, "RSVU") for m in self._computing(state)):
            yield f"{r} reduces", self._reduce(state, r, rank)
        elif rank.phase == "S" and self._may_join(r, rank):
            yield f"{r} joins", self._with(state, r, rank._replace(phase="V"))
        elif rank.phase == "V" and self._refused(state, rank) and all(self._past(p, rank, "V") for p in peers):
            yield f"{r} learns the refusal", self._with(state, r, self._begun_again(r, rank))
        elif rank.phase == "V" and not self._refused(state, rank) and all(self._past(p, rank, "VU") for p in peers):
            switches = " and switches" if rank.voted_for != rank.stands else ""
            yield f"{r} learns the vote{switches}", self._commit(state, r, rank)
        elif rank.phase == "U" and self._gatherable(state, rank):
            yield f"{r} gathers and computes", self._with(state, r, self._begun(state.decision, r, rank))
        yield from self._receive(state, r, rank)
        yield from self._update(state, r, rank)

    def _begun_again(self, r: int, rank: Rank) -> Rank:
        """The same step from other sums; after a vote taken again under what this generation works under."""
        if rank.key // ATTEMPTS == rank.generation:
            return rank._replace(phase=self._first_phase(r, rank.stands), key=rank.key + 1, given=frozenset())
        phase = self._first_phase(r, rank.stands)
        return rank._replace(phase=phase, key=ATTEMPTS * rank.generation, names=rank.stands, given=frozenset())

    def _computing(self, state: State) -> list[int]:
        return [m for m in state.decision.members if m < self.setting.computing]

    def _first_phase(self, r: int, stands: Layout) -> str:
        """Of a step: a rank that computes nothing and owns nothing has nothing to reduce."""
        return "R" if r < self.setting.computing or any(ranks[0] == r for ranks in stands) else "S"

    def _refused(self, state: State, rank: Rank) -> bool:
        """Return whether the vote finds the gradient of block 0 not finite: that of the first attempt at step 0."""
        if not self.setting.refuse or rank.step:
            return False
        return state.decision.refused if rank.key // ATTEMPTS != rank.generation else rank.key == ATTEMPTS

    def _begun(self, decision: Decision, r: int, rank: Rank) -> Rank:
        """The next step, whose vote names what this rank works under, or the placement that all are ready for."""
        ended = len(rank.chain) == self.setting.steps or 0 < rank.ends <= len(rank.chain)
        names, copies = rank.stands, rank.copies
        if rank.moving:
            names = tuple(self._moved(ranks) for ranks in rank.stands)
        if self.faults.retired_before_vote:
            copies = tuple((b, chain) for b, chain in copies if r in names[b])
        if self.setting.replenish and not rank.moving:
            late = len(rank.chain) > decision.first
            if late or (decision.fits and not self.faults.replenished_after_a_vote):
                names = decision.wanted
        phase, step = "E" if ended else self._first_phase(r, rank.stands), len(rank.chain)
        key = ATTEMPTS * rank.generation
        begun = rank._replace(phase=phase, step=step, key=key, names=names, moving=False, copies=copies)
        return begun._replace(given=frozenset())

    def _moved(self, ranks: tuple[int, ...]) -> tuple[int, ...]:
        """A rank without a copy becomes the owner; the last mirror goes."""
        new = next(r for r in range(self.setting.ranks) if r not in ranks)
        return (new, *ranks[:-1])

    def _take(self, state: State, r: int, rank: Rank) -> Iterator[tuple[str, State]]:
        """A copy streamed from its owner, brought to this rank's version; its hash has matched."""
        if rank.phase not in ("RSVU" if self.setting.replenish else "RS"):
            return
        wanted = state.decision.wanted if self.setting.replenish else rank.names
        for block, ranks in enumerate(rank.names):
            source = state.ranks[rank.stands[block][0]]
            chain = dict(source.copies).get(block)
            due = (r in ranks or r in wanted[block]) and block not in dict(rank.copies)
            whole = chain == rank.chain or self.faults.kept_at_any_version
            if chain is not None and due and source.generation == rank.generation and whole:
                copies = tuple(sorted((*rank.copies, (block, chain))))
                yield f"{r} takes {block}", self._with(state, r, rank._replace(copies=copies))

    @staticmethod
    def _past(peer: Rank, rank: Rank, phases: str) -> bool:
        """Return whether ``peer`` has sent, in this generation, the messages of one of ``phases`` of this step."""
        if peer.generation != rank.generation or peer.step != rank.step:
            return peer.generation == rank.generation and peer.step > rank.step
        if peer.phase == "E":
            return False  # it has sent nothing of this step
        return peer.key > rank.key or (peer.key == rank.key and peer.phase in phases)

    def _reduce_blocks(self, state: State, r: int, rank: Rank) -> Iterator[tuple[str, State]]:
        """Contribute to one block after the other; reduce and ship own ones as soon as all have contributed.

        While another placement is to be named, blocks are shipped when all are reduced.
        """
        blocks, held = range(self.setting.computing), {b for b, _ in rank.copies}
        if r in self._computing(state) and len(rank.given) < len(blocks):
            given = rank._replace(given=rank.given | {len(rank.given)})
            yield f"{r} contributes to {len(rank.given)}", self._in_part(state, r, given, frozenset())
        for b in (b for b in blocks if rank.stands[b][0] == r and b in held):
            there = all(self._contributed(state.ranks[m], rank, b) for m in self._computing(state))
            if there and (b, rank.step, rank.key) not in rank.gradients:
                gradients = self._retained(rank.gradients, (b, rank.step, rank.key))
                yield f"{r} reduces {b}", self._in_part(state, r, rank._replace(gradients=gradients), frozenset({b}))

    def _contributed(self, peer: Rank, rank: Rank, block: int) -> bool:
        same = (peer.generation, peer.step, peer.key, peer.phase) == (rank.generation, rank.step, rank.key, "R")
        return block in peer.given if same else self._past(peer, rank, "SVU")

    def _in_part(self, state: State, r: int, rank: Rank, reduced: frozenset[int]) -> State:
        """Ship ``reduced`` blocks; the rank has left phase R when it has contributed to all and reduced its own."""
        held = {b for b, _ in rank.copies}
        owned = frozenset(b for b, ranks in enumerate(rank.stands) if ranks[0] == r and b in held)
        missing = {b for b in owned if (b, rank.step, rank.key) not in rank.gradients}
        is_over = not missing and (r not in self._computing(state) or len(rank.given) == self.setting.computing)
        shipped = reduced if rank.names == rank.stands else owned if is_over else frozenset()
        if is_over:
            rank = rank._replace(phase="S", given=frozenset())
        after = self._with(state, r, rank)
        if self.setting.state_mode:
            return after
        messages = {(m, b, rank.step, rank.key) for b in shipped for m in rank.names[b] if m != r}
        return after._replace(network=state.network | messages)

    def _reduce(self, state: State, r: int, rank: Rank) -> State:
        owned = [b for b, ranks in enumerate(rank.stands) if ranks[0] == r]
        held = {b for b, _ in rank.copies}  # without ``retired_before_vote`` all of them
        gradients = rank.gradients
        for b in owned:
            if b in held:
                gradients = self._retained(gradients, (b, rank.step, rank.key))
        after = self._with(state, r, rank._replace(phase="S", gradients=gradients))
        if self.setting.state_mode:
            return after
        messages = {(m, b, rank.step, rank.key) for b in owned for m in rank.names[b] if m != r}
        return after._replace(network=state.network | messages)

    def _receive_stepped(self, state: State, r: int, rank: Rank) -> Iterator[tuple[str, State]]:
        """A stepped block of the newest version that this rank knows."""
        for message in sorted(m for m in state.network if m[0] == r and m[2] < len(rank.chain)):
            _, block, step, computation = message
            chain = dict(rank.copies).get(block)
            if computation // ATTEMPTS == rank.generation and chain is not None and len(chain) == step:
                copies = tuple((b, (*c, computation) if b == block else c) for b, c in rank.copies)
                after = self._with(state, r, rank._replace(copies=copies))
                yield f"{r} takes stepped {block}", after._replace(network=state.network - {message})

    def _receive(self, state: State, r: int, rank: Rank) -> Iterator[tuple[str, State]]:
        if self.setting.state_mode:
            yield from self._receive_stepped(state, r, rank)
            return
        mine = frozenset(m for m in state.network if m[0] == r and m[1] in dict(rank.copies))
        current = frozenset(m for m in mine if m[2:] == (rank.step, rank.key) and rank.phase in "RS")
        mirrored = sum(r in ranks and rank.stands[b][0] != r for b, ranks in enumerate(rank.names))
        if self.setting.early and self.faults == Faults():
            parts = [frozenset({message}) for message in sorted(current)]
        elif self.faults != Faults():
            parts = [frozenset({message}) for message in sorted(mine)]
        else:
            parts = [current] if current and len(current) == mirrored else []
        for messages in parts:
            gradients = rank.gradients
            for _, block, step, computation in messages:
                wanted = computation // ATTEMPTS == rank.generation or self.faults.generation_ignored
                if wanted and len(dict(rank.copies)[block]) <= step:
                    gradients = self._retained(gradients, (block, step, computation))
                if sum(g[0] == block for g in gradients) > 2:
                    self.broken(f"rank {r} needs a third gradient slot for block {block}")
            after = self._with(state, r, rank._replace(gradients=gradients))
            yield f"{r} receives {len(messages)}", after._replace(network=state.network - messages)

    def _retained(self, gradients: frozenset[Gradient], new: Gradient) -> frozenset[Gradient]:
        """An older attempt at the same step makes room."""
        if self.faults.generation_ignored:
            return gradients | {new}
        return frozenset(g for g in gradients if g[:2] != new[:2] or g[2] > new[2]) | {new}

    def _may_join(self, r: int, rank: Rank) -> bool:
        copies = dict(rank.copies)
        due = [b for b, ranks in enumerate(rank.names) if r in ranks]
        again = rank.key // ATTEMPTS != rank.generation  # a decision names the gradients, no message brings them
        named = {g for _, _, g in rank.gradients if g == rank.key or (again and self._name(g) == rank.key)}
        held = {(b, s) for b, s, g in rank.gradients if g in named or self.faults.generation_ignored}
        needed = [b for b in due if rank.names[b][0] == r] if self.setting.state_mode else due
        arrived = self.faults.vote_before_mirrors or all((b, rank.step) in held for b in needed)
        replayed = self.faults.no_back_pressure or all(len(copies[b]) == rank.step for b in due if b in copies)
        return arrived and replayed and all(b in copies for b in due)

    def _commit(self, state: State, r: int, rank: Rank) -> State:
        gradients, chain, layout = rank.gradients, (*rank.chain, rank.key), rank.voted_for
        decision = state.decision
        if self.setting.replenish and decision.fits and rank.key // ATTEMPTS == rank.generation:
            due = min(self.setting.mirrors + 1, len(decision.members))
            if any(len(ranks) < due for ranks in layout):
                self.broken(f"a step after a loss is committed without the copies that are missing: {layout}")
        if self.faults.dropped_before_update:
            gradients = frozenset(g for g in gradients if rank.stands[g[0]][0] == r)
        copies = tuple((b, c) for b, c in rank.copies if r in layout[b])  # the others have left
        gradients = frozenset(g for g in gradients if r in layout[g[0]])
        learned = rank._replace(
            phase="U",
            chain=chain,
            gradients=gradients,
            copies=copies,
            layout=layout,
            stands=layout,
            names=layout,
            moving=state.ready == (rank.generation, rank.step),
            ends=len(chain) if state.drained == (rank.generation, rank.step) else rank.ends,
        )
        after = self._with(state, r, learned)
        return after._replace(committed=max(state.committed, chain, key=len))

    def _update(self, state: State, r: int, rank: Rank) -> Iterator[tuple[str, State]]:
        for i, (block, chain) in enumerate(rank.copies):
            step = len(chain)
            usable = sorted(
                g
                for g in rank.gradients
                if g[:2] == (block, step)
                and step < len(rank.chain)
                and (self._name(g[2]) == self._name(rank.chain[step]) or self.faults.generation_ignored)
            )
            if not usable:
                continue
            if block in rank.torn:
                self.broken(f"rank {r} steps a part of block {block} for the second time")
            if state.tears:
                torn = rank._replace(torn=rank.torn | {block}, frozen=state.freeze + 1)
                stopped = self._with(state, r, torn)
                yield f"{r} tears {block}", stopped._replace(tears=state.tears - 1, freeze=state.freeze + 1)
            new = (*chain, usable[0][2])
            if new != rank.chain[: step + 1]:
                self.broken(f"rank {r} block {block} becomes {new}, the record says {rank.chain}")
            copies = (*rank.copies[:i], (block, new), *rank.copies[i + 1 :])
            left = frozenset(g for g in rank.gradients if g[0] != block or g[1] > step)
            after = self._with(state, r, rank._replace(copies=copies, gradients=left))
            if self.setting.state_mode and rank.stands[block][0] == r:
                stepped = {(m, block, step, usable[0][2]) for m in rank.stands[block][1:]}
                after = after._replace(network=after.network | stepped)
            yield f"{r} updates {block}", after

    def _gatherable(self, state: State, rank: Rank) -> bool:
        for block, (owner, *_) in enumerate(rank.stands):
            peer = state.ranks[owner]
            chain = dict(peer.copies).get(block)
            if chain is None or peer.generation != rank.generation or len(chain) < len(rank.chain):
                return False
            if chain[: len(rank.chain)] != rank.chain:
                self.broken(f"gather mixes block {block} at {chain} with record {rank.chain}")
            if self.setting.state_mode and not self._have(state, rank, block):
                return False
        return True

    @staticmethod
    def _have(state: State, rank: Rank, block: int) -> bool:
        """Return whether every copy of ``block`` is at the newest version that ``rank`` knows, or beyond."""
        chains = [dict(state.ranks[m].copies).get(block, ()) for m in rank.stands[block]]
        return all(len(chain) >= len(rank.chain) for chain in chains)
