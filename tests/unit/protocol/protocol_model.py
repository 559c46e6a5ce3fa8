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

Claims checked in every reachable state: see :class:`Violation`. ``Faults`` switch
single rules off, to see that the exploration notices.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

from megatron.elastic.state.layout import BlockKey
from megatron.elastic.state.protocol import NOTHING, Holdings, Resolution, all_copies, resolve
from megatron.elastic.state.record import GradientKey, StepRecord
from tests.scenario.points import scenario_of
from tests.unit.protocol.protocol_state import (
    ATTEMPTS,
    Chain,
    Decision,
    Faults,
    Gradient,
    Layout,
    Rank,
    Setting,
    State,
    Violation,
    initial_state,
)

__all__ = ["Faults", "Model", "Setting", "TooManyStates", "Violation", "done", "explore", "found_by"]


class Model:
    """Successors of a state, with the claims asserted on the way."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.faults = setting.faults

    def successors(self, state: State) -> Iterator[tuple[str, State]]:
        """All (action, next state)."""
        dead = sum(not rank.alive for rank in state.ranks)
        if dead > state.seen_dead:
            yield f"freeze {state.freeze + 1}", state._replace(freeze=state.freeze + 1, seen_dead=dead)
        if state.migrations and not dead and state.freeze == state.decided:
            step = max(rank.step for rank in state.ranks)
            if all(rank.step < step or rank.phase in "RS" for rank in state.ranks):  # nobody has joined that vote
                yield "all are ready", state._replace(migrations=state.migrations - 1, ready=(state.decided, step))
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

    def is_progress(self, action: str) -> bool:
        """Whether a job in which nothing but ``action`` can happen goes on: a rank need not be killed."""
        return not action.startswith("kill")

    @staticmethod
    def _with(state: State, r: int, rank: Rank) -> State:
        return state._replace(ranks=(*state.ranks[:r], rank, *state.ranks[r + 1 :]))

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
        if rank.phase == "R" and all(self._past(state.ranks[m], rank, "RSVU") for m in self._computing(state)):
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
            return rank._replace(phase=self._first_phase(r, rank.stands), key=rank.key + 1)
        phase = self._first_phase(r, rank.stands)
        return rank._replace(phase=phase, key=ATTEMPTS * rank.generation, names=rank.stands)

    def _computing(self, state: State) -> list[int]:
        return [m for m in state.decision.members if m < self.setting.computing]

    def _first_phase(self, r: int, stands: Layout) -> str:
        """Of a step: a rank that computes nothing and owns nothing has nothing to reduce."""
        return "R" if r < self.setting.computing or any(ranks[0] == r for ranks in stands) else "S"

    def _refused(self, state: State, rank: Rank) -> bool:
        """Whether the vote finds the gradient of block 0 not finite, as the first computation of step 0 left it."""
        if not self.setting.refuse or rank.step:
            return False
        return state.decision.refused if rank.key // ATTEMPTS != rank.generation else rank.key == ATTEMPTS

    def _name(self, computation: int) -> int:
        """What a gradient goes by: the computation it comes from, unless its attempt is ignored."""
        return computation - computation % ATTEMPTS if self.faults.attempt_ignored else computation

    def _key(self, step: int, computation: int) -> GradientKey:
        return GradientKey(step, *divmod(self._name(computation), ATTEMPTS))

    def _begun(self, decision: Decision, r: int, rank: Rank) -> Rank:
        """The next step, whose vote names what this rank works under, or the placement that all are ready for."""
        ended = len(rank.chain) == self.setting.steps
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
        return rank._replace(phase=phase, step=step, key=key, names=names, moving=False, copies=copies)

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
        """Whether what ``peer`` sends on entering one of ``phases`` of this step was sent in this generation."""
        if peer.generation != rank.generation or (peer.step < rank.step and peer.phase != "E"):
            return False
        if peer.step > rank.step or peer.phase == "E":
            return True
        return peer.key > rank.key or (peer.key == rank.key and peer.phase in phases)

    def _reduce(self, state: State, r: int, rank: Rank) -> State:
        owned = [b for b, ranks in enumerate(rank.stands) if ranks[0] == r]
        held = {b for b, _ in rank.copies}  # without ``retired_before_vote`` all of them
        gradients = rank.gradients
        for b in owned:
            if b in held:
                gradients = self._retained(gradients, (b, rank.step, rank.key))
        messages = {(m, b, rank.step, rank.key) for b in owned for m in rank.names[b] if m != r}
        after = self._with(state, r, rank._replace(phase="S", gradients=gradients))
        return after._replace(network=state.network | messages)

    def _receive(self, state: State, r: int, rank: Rank) -> Iterator[tuple[str, State]]:
        mine = frozenset(m for m in state.network if m[0] == r and m[1] in dict(rank.copies))
        current = frozenset(m for m in mine if m[2:] == (rank.step, rank.key) and rank.phase in "RS")
        mirrored = sum(r in ranks and rank.stands[b][0] != r for b, ranks in enumerate(rank.names))
        if self.faults != Faults():
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
                    raise Violation(f"rank {r} needs a third gradient slot for block {block}")
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
        arrived = self.faults.vote_before_mirrors or all((b, rank.step) in held for b in due)
        replayed = self.faults.no_back_pressure or all(len(copies[b]) == rank.step for b in due if b in copies)
        return arrived and replayed and all(b in copies for b in due)

    def _commit(self, state: State, r: int, rank: Rank) -> State:
        gradients, chain, layout = rank.gradients, (*rank.chain, rank.key), rank.voted_for
        decision = state.decision
        if self.setting.replenish and decision.fits and rank.key // ATTEMPTS == rank.generation:
            due = min(self.setting.mirrors + 1, len(decision.members))
            if any(len(ranks) < due for ranks in layout):
                raise Violation(f"a step after a loss is committed without the copies that are missing: {layout}")
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
            new = (*chain, usable[0][2])
            if new != rank.chain[: step + 1]:
                raise Violation(f"rank {r} block {block} becomes {new}, the record says {rank.chain}")
            copies = (*rank.copies[:i], (block, new), *rank.copies[i + 1 :])
            left = frozenset(g for g in rank.gradients if g[0] != block or g[1] > step)
            yield f"{r} updates {block}", self._with(state, r, rank._replace(copies=copies, gradients=left))

    def _gatherable(self, state: State, rank: Rank) -> bool:
        for block, (owner, *_) in enumerate(rank.stands):
            peer = state.ranks[owner]
            chain = dict(peer.copies).get(block)
            if chain is None or peer.generation != rank.generation or len(chain) < len(rank.chain):
                return False
            if chain[: len(rank.chain)] != rank.chain:
                raise Violation(f"gather mixes block {block} at {chain} with record {rank.chain}")
        return True

    # --- a change of membership ---------------------------------------------------------------

    def _decide(self, state: State, dead: int) -> Iterator[tuple[str, State]]:
        alive = [r for r, rank in enumerate(state.ranks) if rank.alive]
        waiting = state.decided < state.freeze and dead == state.seen_dead
        if not alive or not waiting or any(state.ranks[r].frozen != state.freeze for r in alive):
            return
        survivors = tuple((r, state.ranks[r]) for r in alive)
        named = max((rank for _, rank in survivors), key=lambda rank: len(rank.chain)).layout
        if any(named not in (rank.layout, rank.stands, rank.names) for _, rank in survivors):
            raise Violation("the newest record names a placement that some survivor never heard of")
        layout, outcome = self._resolve(survivors, named)
        self._check_decision(state, alive, named, outcome)
        base = tuple(tuple(r for r in ranks if r in alive) for ranks in layout)
        wanted = tuple(self._replenished(ranks, alive) for ranks in base) if self.setting.replenish else base
        late = state.network if self.faults.generation_ignored else frozenset()
        for fits in (True,) if wanted == base else (True, False):
            decision = Decision(
                kind=outcome.kind,
                chain=self._chain_of(survivors, outcome),
                key=_computation(outcome.gradient_key) if outcome.gradient_key else ATTEMPTS * state.freeze,
                members=frozenset(alive),
                named=named,
                base=base,
                refused=bool(base[0]) and (0, 0, ATTEMPTS) in state.ranks[base[0][0]].gradients,
                wanted=wanted,
                fits=fits,
                first=outcome.version,
            )
            after = state._replace(decision=decision, decided=state.freeze, network=late)
            yield f"decide {outcome.kind} {outcome.version}", after

    def _replenished(self, ranks: tuple[int, ...], alive: list[int]) -> tuple[int, ...]:
        """With as many mirrors as it should have, or as there are ranks for."""
        more = [r for r in alive if r not in ranks]
        return (*ranks, *more[: max(0, self.setting.mirrors + 1 - len(ranks))])

    def _moved(self, ranks: tuple[int, ...]) -> tuple[int, ...]:
        """A rank without a copy becomes the owner; the last mirror goes."""
        new = next(r for r in range(self.setting.ranks) if r not in ranks)
        return (new, *ranks[:-1])

    @staticmethod
    def _chain_of(survivors: tuple[tuple[int, Rank], ...], outcome: Resolution) -> Chain:
        version = outcome.record.version if outcome.record else 0
        return next((rank.chain[:version] for _, rank in survivors if len(rank.chain) >= version), ())

    @cache  # noqa: B019  (a model lives as long as its exploration)
    def _resolve(self, survivors: tuple[tuple[int, Rank], ...], named: Layout) -> tuple[Layout, Resolution]:
        """Whose copies count, and what is done with them."""
        reports = {r: self._report(r, rank) for r, rank in survivors}
        if self.faults.newest_copy_wins:
            newest = max((record for held in reports.values() for record in held.records), key=lambda x: x.version)
            return named, Resolution("roll_forward", newest.version, newest.gradient, newest)
        counted = all_copies(_keyed(named), reports)
        together = len({rank.names for _, rank in survivors}) == 1
        again = all_copies(_keyed(survivors[0][1].names), reports) if together else None
        if self.faults.leaving_carry_a_vote:
            again = counted
        outcome = resolve(reports, counted, self.setting.ranks, again)
        configuration = counted
        if outcome.kind == "revote" and again is not None and not self.faults.revote_under_the_record:
            configuration = again
        return tuple(tuple(configuration[b, 0, 0]) for b in range(len(named))), outcome

    def _report(self, r: int, rank: Rank) -> Holdings:
        versions = [len(chain) for _, chain in rank.copies]
        keys = sorted({self._key(s, g) for _, s, g in rank.gradients})
        copies = dict(rank.copies)
        statistics = []
        if rank.phase in "RSV":
            own = ((r, r + 1),)
            rows = ((0, self.setting.ranks),) if self.setting.statistics_travel and rank.phase != "R" else own
            statistics = [(self._key(rank.step, rank.key), rows)]
        if rank.phase in "SV":  # ready to vote as soon as every gradient is here, perhaps none
            keys = sorted({*keys, self._key(rank.step, rank.key)})
        complete = tuple(k for k in keys if self._complete(r, rank, copies, k))
        if self.faults.gradient_does_not_count:
            complete = ()
        chains = (rank.chain[:v] for v in range(max(0, len(rank.chain) - 1), len(rank.chain) + 1))
        records = tuple(_record(chain, self._name(chain[-1]) if chain else 0) for chain in chains)
        more = [b for b, _ in rank.copies if r not in rank.layout[b]]
        if not self.faults.offered_without_gradient:
            held = {(b, self._key(s, g)) for b, s, g in rank.gradients}
            more = [b for b in more if all(len(copies[b]) > k.step or (b, k) in held for k in complete)]
        offered = tuple((b, 0, 0) for b in more)
        if self.faults.only_named_copies:
            offered = ()
        # Whoever holds nothing says so.
        oldest, newest = min(versions, default=NOTHING), max(versions, default=NOTHING)
        return Holdings(r, oldest, newest, complete, records, tuple(statistics), offered=offered)

    def _counts(self, r: int, rank: Rank, block: int) -> bool:
        """Whether a copy that no vote has named can do what its rank's others can."""
        if r in rank.layout[block]:
            return False
        if self.faults.offered_without_gradient:
            return True
        copies = dict(rank.copies)
        held = {(b, self._key(s, g)) for b, s, g in rank.gradients}
        keys = {key for _, key in held}
        if rank.phase in "SV":
            keys.add(self._key(rank.step, rank.key))
        able = [k for k in keys if self._complete(r, rank, copies, k)]
        return all(len(copies[block]) > k.step or (block, k) in held for k in able)

    def _complete(self, r: int, rank: Rank, copies: dict[int, Chain], key: GradientKey) -> bool:
        """Of the step under way: whether this rank could vote; of an earlier one: whether every copy can follow."""
        due = list(copies)
        if key.step == len(rank.chain) and not self.faults.leaving_must_vote:
            due = [b for b, ranks in enumerate(rank.names) if r in ranks]
            if self.faults.joining_need_not_vote:
                due = [b for b in due if b in copies]
        held = {(b, self._key(s, g)) for b, s, g in rank.gradients}
        return all(b in copies and (len(copies[b]) > key.step or (b, key) in held) for b in due)

    def _check_decision(self, state: State, alive: list[int], named: Layout, outcome: Resolution) -> None:
        survivors = [(r, state.ranks[r]) for r in alive]
        here = {b for r, rank in survivors for b, _ in rank.copies if r in named[b] or self._counts(r, rank, b)}
        orphaned = [b for b in range(len(named)) if b not in here]
        if orphaned and len(state.ranks) - len(alive) <= self.setting.mirrors:
            raise Violation(f"blocks {orphaned} are lost with no more losses than mirrors")
        if orphaned and state.owed >= 0:
            raise Violation(f"blocks {orphaned} are lost though enough copies were there")
        if outcome.kind == "lost":
            if not orphaned:
                raise Violation(f"state declared lost though every block has a copy: missing {outcome.missing}")
            return
        if orphaned:
            raise Violation(f"going on without any copy of {orphaned}")
        known = max((state.ranks[r].chain for r in alive), key=len)
        few = len(state.ranks) - len(alive) <= self.setting.mirrors
        kept = few or self._within_reach(survivors, state.committed)
        owed = state.committed if self.setting.statistics_travel and kept else known
        if outcome.version < len(owed):
            raise Violation(f"committed version {len(owed)} is lost: {outcome}")
        key = outcome.gradient_key
        if (
            outcome.kind == "revote"
            and len(owed) == outcome.version
            and (key is None or self._name(owed[-1]) != _computation(key))
        ):
            raise Violation(f"the vote is taken again on other gradients than those committed: {outcome}")
        if outcome.kind == "revote" and key is not None:
            able = {b for _, rank in survivors for b, *rest in rank.gradients if self._key(*rest) == key}
            if len(able) < len(named):
                raise Violation(f"the vote is taken again without any gradient of {set(range(len(named))) - able}")

    @staticmethod
    def _within_reach(survivors: list[tuple[int, Rank]], chain: Chain) -> bool:
        """Whether of every block a copy that the vote named is at ``chain``, or a step behind with its gradient."""
        step = len(chain) - 1
        there = {
            b
            for r, rank in survivors
            for b, at in rank.copies
            if r in rank.names[b] and (len(at) > step or (len(at) == step and (b, step, chain[-1]) in rank.gradients))
        }
        return len(there) == len(survivors[0][1].layout)

    def _adopt(self, state: State, r: int, rank: Rank) -> State:
        decision = state.decision
        version = len(decision.chain)
        revote = decision.kind == "revote"
        kept = frozenset(
            g
            for g in rank.gradients
            if self.faults.generation_ignored
            or g[1] < version
            or (revote and (g[1], self._name(g[2])) == (version, decision.key))
        )
        held = decision.base
        if revote and not self.faults.retired_before_revote:  # a copy goes with a vote, not with a decision
            held = tuple((*held[b], *ranks) for b, ranks in enumerate(decision.named))
        copies = tuple((b, chain) for b, chain in rank.copies if r in held[b])
        for block, chain in copies:
            if chain != decision.chain[: len(chain)]:
                raise Violation(f"rank {r} block {block} at {chain} beside decision {decision.chain}")
        after = rank._replace(
            generation=state.decided,
            phase="S" if revote else "U",
            step=version if revote else version - 1,  # whose end is still to come: it has sent nothing of the next
            key=decision.key if revote else ATTEMPTS * state.decided,
            chain=decision.chain,
            copies=copies,
            gradients=frozenset(g for g in kept if r in held[g[0]]),
            layout=decision.named,
            stands=decision.base,
            names=rank.names if revote else decision.base,
            moving=False,
        )
        return self._with(state, r, after)


def _computation(key: GradientKey) -> int:
    return ATTEMPTS * key.generation + key.attempt


def _keyed(layout: Layout) -> dict[BlockKey, tuple[int, ...]]:
    return {(b, 0, 0): ranks for b, ranks in enumerate(layout)}


@cache
def _record(chain: Chain, name: int) -> StepRecord:
    gradient = GradientKey(len(chain) - 1, *divmod(name, ATTEMPTS)) if chain else None
    return StepRecord(len(chain), gradient=gradient, ledger_hash=str(chain))


def done(state: State) -> bool:
    """Whether it is right that nothing more can happen here."""
    alive = [rank for rank in state.ranks if rank.alive]
    return state.decision.kind == "lost" or all(rank.phase == "E" for rank in alive)


class TooManyStates(RuntimeError):
    """There are more states to explore than was allowed."""


def explore(setting: Setting, limit: int = 3_000_000, model: Model | None = None) -> dict[str, int]:
    """Visit every reachable state, depth first. Returns counts.

    ``model``: one of ``setting`` that leaves some interleavings out. Raises :class:`Violation` with the way there, and
    :class:`TooManyStates`.
    """
    model, start = model or Model(setting), initial_state(setting)
    came: dict[State, tuple[State, str] | None] = {start: None}
    stack, kinds, edges = [start], dict[str, int](), 0
    while stack:
        state = stack.pop()
        progress = False
        try:
            for action, following in model.successors(state):
                edges += 1
                progress = progress or model.is_progress(action)
                if following not in came:
                    came[following] = (state, action)
                    stack.append(following)
                    if action.startswith("decide") or action.endswith("switches"):
                        kinds[action] = kinds.get(action, 0) + 1
            if not progress and not done(state):
                raise Violation("stuck: no rank can continue")
        except Violation as error:
            raise found_by(setting, error, _way(came, state)) from None
        if len(came) > limit:
            raise TooManyStates(f"more than {limit} states")
    return {"states": len(came), "edges": edges, **dict(sorted(kinds.items()))}


def found_by(setting: Setting, error: Violation, way: tuple[tuple[State, str], ...]) -> Violation:
    """``error`` with the way to it, as actions and as a scenario."""
    actions = " | ".join(action for _, action in way)
    return Violation(f"{error}; scenario: {scenario_of(setting, way)}; after: {actions}", way)


def _way(came: dict[State, tuple[State, str] | None], state: State) -> tuple[tuple[State, str], ...]:
    way = []
    while (step := came[state]) is not None:
        state = step[0]
        way.append(step)
    return tuple(way[::-1])
