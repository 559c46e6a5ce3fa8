"""A change of membership in the bounded model: reports, the decision on them, and its effect on a survivor.

The decision is the product's own: :meth:`Decisions._report` makes real ``Holdings``, and the real ``all_copies`` and
``resolve`` are called on them. What a copy contains must follow from that; :meth:`Decisions._check_decision` and
:meth:`Decisions._adopt` assert it.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

from megatron.elastic.state.layout import BlockKey
from megatron.elastic.state.protocol import NOTHING, Holdings, Resolution, all_copies, resolve
from megatron.elastic.state.record import GradientKey, StepRecord
from tests.unit.protocol.protocol_state import ATTEMPTS, Chain, Decision, Layout, Rank, Setting, State, Violation

__all__ = ["Decisions"]


class Decisions:
    """The part of the model that acts on losses."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.faults = setting.faults

    def broken(self, claim: str) -> None:
        """A claim does not hold. Raises :class:`Violation`; a subclass may go on, to see what becomes of it."""
        raise Violation(claim)

    @staticmethod
    def _with(state: State, r: int, rank: Rank) -> State:
        return state._replace(ranks=(*state.ranks[:r], rank, *state.ranks[r + 1 :]))

    def _name(self, computation: int) -> int:
        """The name of a gradient: the computation it comes from, unless its attempt is ignored."""
        return computation - computation % ATTEMPTS if self.faults.attempt_ignored else computation

    def _key(self, step: int, computation: int) -> GradientKey:
        return GradientKey(step, *divmod(self._name(computation), ATTEMPTS))

    def _decide(self, state: State, dead: int) -> Iterator[tuple[str, State]]:
        alive = [r for r, rank in enumerate(state.ranks) if rank.alive]
        waiting = state.decided < state.freeze and dead == state.seen_dead
        if not alive or not waiting or any(state.ranks[r].frozen != state.freeze for r in alive):
            return
        survivors = tuple((r, state.ranks[r]) for r in alive)
        named = max((rank for _, rank in survivors), key=lambda rank: len(rank.chain)).layout
        if any(named not in (rank.layout, rank.stands, rank.names) for _, rank in survivors):
            self.broken("the newest record names a placement that some survivor never heard of")
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
                torn=frozenset((b, r) for r, rank in survivors for b in rank.torn),
                ends=max(rank.ends if rank.ends <= outcome.version else 0 for _, rank in survivors),
                missing=tuple(block for block, *_ in outcome.missing),
            )
            after = state._replace(decision=decision, decided=state.freeze, network=late)
            yield f"decide {outcome.kind} {outcome.version}", after

    def _replenished(self, ranks: tuple[int, ...], alive: list[int]) -> tuple[int, ...]:
        """With as many mirrors as it should have, or as there are ranks for."""
        more = [r for r in alive if r not in ranks]
        return (*ranks, *more[: max(0, self.setting.mirrors + 1 - len(ranks))])

    @staticmethod
    def _chain_of(survivors: tuple[tuple[int, Rank], ...], outcome: Resolution) -> Chain:
        version = outcome.record.version if outcome.record else 0
        return next((rank.chain[:version] for _, rank in survivors if len(rank.chain) >= version), ())

    @cache  # noqa: B019  (a model lives as long as its exploration)
    def _resolve(self, survivors: tuple[tuple[int, Rank], ...], named: Layout) -> tuple[Layout, Resolution]:
        """Whose copies count, and what is done with them."""
        reports = {r: self._report(r, rank) for r, rank in survivors}
        if self.faults.versions_mixed:
            newest = max((record for held in reports.values() for record in held.records), key=lambda x: x.version)
            return named, Resolution("rerun", newest.version, None, newest)
        if self.faults.newest_copy_wins:
            newest = max((record for held in reports.values() for record in held.records), key=lambda x: x.version)
            return named, Resolution("roll_forward", newest.version, newest.gradient, newest)
        counted = all_copies(_keyed(named), reports)
        together = len({rank.names for _, rank in survivors}) == 1
        again = all_copies(_keyed(survivors[0][1].names), reports) if together else None
        if self.faults.leaving_carry_a_vote:
            again = counted
        outcome = resolve(reports, counted, lambda _: self.setting.ranks, again)
        configuration = counted
        if outcome.kind == "revote" and again is not None and not self.faults.revote_under_the_record:
            configuration = again
        torn = {(r, key) for r, held in reports.items() for key in held.torn}
        kept = {key: tuple(r for r in ranks if (r, key) not in torn) for key, ranks in configuration.items()}
        return tuple(kept[b, 0, 0] for b in range(len(named))), outcome

    def _report(self, r: int, rank: Rank) -> Holdings:
        torn = frozenset[int]() if self.faults.torn_counts else rank.torn
        rank = rank._replace(copies=tuple((b, chain) for b, chain in rank.copies if b not in torn))
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
        # A rank without copies reports that too.
        oldest, newest = min(versions, default=NOTHING), max(versions, default=NOTHING)
        torn_keys = tuple((b, 0, 0) for b in sorted(torn))
        floor = max((max(0, v - 1) for v in versions), default=NOTHING) if self.setting.state_mode else None
        return Holdings(oldest, newest, complete, records, tuple(statistics), torn_keys, floor, offered)

    def _counts(self, r: int, rank: Rank, block: int) -> bool:
        """Return whether a copy that no vote has named can do the same as its rank's others."""
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

    def _is_counted(self, r: int, rank: Rank, block: int, named: Layout) -> bool:
        """Return whether a copy counts: the record names it, or it can do what its rank's others can."""
        return r in named[block] or self._counts(r, rank, block)

    def _complete(self, r: int, rank: Rank, copies: dict[int, Chain], key: GradientKey) -> bool:
        """Of the step under way: whether this rank could vote; of an earlier one: whether every copy can follow."""
        due = list(copies)
        if key.step == len(rank.chain) and not self.faults.leaving_must_vote:
            due = [b for b, ranks in enumerate(rank.names) if r in ranks and (b in copies or b not in rank.torn)]
            if self.faults.joining_need_not_vote:
                due = [b for b in due if b in copies]
        held = {(b, self._key(s, g)) for b, s, g in rank.gradients}
        return all(b in copies and (len(copies[b]) > key.step or (b, key) in held) for b in due)

    def _check_decision(self, state: State, alive: list[int], named: Layout, outcome: Resolution) -> None:
        survivors = [(r, state.ranks[r]) for r in alive]
        whole = [(r, rank, b) for r, rank in survivors for b, _ in rank.copies if b not in rank.torn]
        here = {b for r, rank, b in whole if self._is_counted(r, rank, b, named)}
        orphaned = [b for b in range(len(named)) if b not in here]
        if orphaned and len(state.ranks) - len(alive) <= self.setting.mirrors:
            self.broken(f"blocks {orphaned} are lost with no more losses than mirrors")
        if orphaned and state.owed >= 0:
            self.broken(f"blocks {orphaned} are lost though enough copies were there")
        if outcome.kind == "lost":
            if not orphaned:
                self.broken(f"state declared lost though every block has a copy: missing {outcome.missing}")
            return
        if orphaned:
            self.broken(f"going on without any copy of {orphaned}")
        known = max((state.ranks[r].chain for r in alive), key=len)
        few = len(state.ranks) - len(alive) <= self.setting.mirrors
        kept = few or self._within_reach(survivors, state.committed)
        owed = state.committed if self.setting.statistics_travel and kept else known
        if self.setting.state_mode:
            owed = owed[:-1]
        if outcome.version < len(owed):
            self.broken(f"committed version {len(owed)} is lost: {outcome}")
        key = outcome.gradient_key
        if (
            outcome.kind == "revote"
            and len(owed) == outcome.version
            and (key is None or self._name(owed[-1]) != _computation(key))
        ):
            self.broken(f"the vote is taken again on other gradients than those committed: {outcome}")
        if outcome.kind == "revote" and key is not None:
            able = {b for _, rank in survivors for b, *rest in rank.gradients if self._key(*rest) == key}
            if len(able) < len(named):
                self.broken(f"the vote is taken again without any gradient of {set(range(len(named))) - able}")

    @staticmethod
    def _within_reach(survivors: list[tuple[int, Rank]], chain: Chain) -> bool:
        """Return whether each block has a copy, named by the vote, at ``chain`` or a step behind with its gradient."""
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
        copies = tuple((b, chain) for b, chain in rank.copies if r in held[b] and self._is_whole(rank, b))
        if self.setting.state_mode:
            copies = tuple((b, chain[:version]) for b, chain in copies)
        for block, chain in copies:
            if chain != decision.chain[: len(chain)]:
                self.broken(f"rank {r} block {block} at {chain} beside decision {decision.chain}")
            steps = {step for b, step, _ in kept if b == block}
            if self.setting.state_mode and not steps >= {*range(len(chain), version)}:
                self.broken(f"rank {r} goes on with block {block} at {chain} in state {decision.chain}")
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
            names=self._names_left(rank.names, decision) if revote else decision.base,
            moving=False,
            ends=self._end_known(rank, decision),
            torn=rank.torn if self.faults.torn_counts else frozenset(),
            given=frozenset(),
        )
        return self._with(state, r, after)

    def _names_left(self, names: Layout, decision: Decision) -> Layout:
        """Return what a vote that is taken again was to name, without torn copies."""
        if self.faults.torn_counts or not decision.torn:
            return names
        return tuple(tuple(r for r in ranks if (b, r) not in decision.torn) for b, ranks in enumerate(names))

    def _is_whole(self, rank: Rank, block: int) -> bool:
        return self.faults.torn_counts or block not in rank.torn

    def _end_known(self, rank: Rank, decision: Decision) -> int:
        """Return the version with which the job ends, by what is told of the newest record."""
        if self.faults.drain_not_recorded:
            return rank.ends if rank.ends <= len(decision.chain) else 0
        return decision.ends if decision.ends <= len(decision.chain) else 0


def _computation(key: GradientKey) -> int:
    return ATTEMPTS * key.generation + key.attempt


def _keyed(layout: Layout) -> dict[BlockKey, tuple[int, ...]]:
    return {(b, 0, 0): ranks for b, ranks in enumerate(layout)}


@cache
def _record(chain: Chain, name: int) -> StepRecord:
    gradient = GradientKey(len(chain) - 1, *divmod(name, ATTEMPTS)) if chain else None
    return StepRecord(len(chain), gradient=gradient, ledger_hash=str(chain))
