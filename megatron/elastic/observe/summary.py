"""One readable line per recovery, in the field's words.

For example::

    recovered at generation 3 without tensor-parallel group {4,5} (stage 1, replica 0; rank 4 parked): step 57 rolled
    forward, 0 steps lost, 0.184 s (decide 0.021, edit 0.090, ...)
    mirrors complete with step 58: 12 state blocks were short of one for 0.412 s (1 step)

The launcher has reported each loss before: host, step, cause and last lines of the process.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from megatron.elastic.observe.event_kinds import ProtectionEvent, RankLostEvent, RecoveryEvent

__all__ = ["lost_text", "protection_line", "ranks_text", "recovery_line"]


def ranks_text(ranks: Iterable[int]) -> str:
    """``{4,5}``; long runs are shortened: ``{0-63,70}``."""
    spans: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    parts = []
    for first, last in spans:
        parts.append(str(first) if first == last else f"{first},{last}" if last == first + 1 else f"{first}-{last}")
    return "{" + ",".join(parts) + "}"


def lost_text(losses: Sequence[RankLostEvent], parked: Iterable[int] = (), going_on: Iterable[int] = ()) -> str:
    """Tensor-parallel groups that lost ranks, in order of rank, and where each had its place.

    ``parked``: living ranks of those groups that compute nothing until they are used again; ``going_on``: ranks that
    compute as a smaller group.
    """
    groups: dict[tuple[int, ...], list[RankLostEvent]] = {}
    for loss in sorted(losses, key=lambda one: one.lost_rank):
        groups.setdefault(loss.tensor_parallel_group or (loss.lost_rank,), []).append(loss)
    waiting, active = set(parked), set(going_on)
    return ", ".join(
        _group_text(group, lost, sorted(waiting & set(group)), sorted(active & set(group)))
        for group, lost in groups.items()
    )


def _group_text(
    group: tuple[int, ...], lost: Sequence[RankLostEvent], idle: Sequence[int], active: Sequence[int]
) -> str:
    """``tensor-parallel group {4,5} (stage 1, replica 0; rank 4 parked)`` or ``rank 4 (stage 1, replica 0)``.

    Of a group that goes on: ``rank 5 of tensor-parallel group {4,5} (stage 1, replica 0; rank 4 goes on)``.
    """
    loss = lost[0]
    name = f"tensor-parallel group {ranks_text(group)}" if len(group) > 1 else f"rank {loss.lost_rank}"
    if active:
        name = f"{_ranks([one.lost_rank for one in lost])} of {name}"
    place = [f"stage {loss.stage}"] if loss.stage is not None else []
    place += [f"replica {loss.replica}"] if loss.replica is not None else []
    parts = [", ".join(place) or "no part of a pipeline"]
    if idle:
        parts.append(f"{_ranks(idle)} parked")
    if active:
        parts.append(f"{_ranks(active)} {'goes' if len(active) == 1 else 'go'} on")
    return f"{name} ({'; '.join(parts)})"


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks_text(ranks)}"


def recovery_line(
    recovery: RecoveryEvent,
    generation: int,
    losses: Sequence[RankLostEvent] = (),
    parked: Iterable[int] = (),
    going_on: Iterable[int] = (),
) -> str:
    """One line: missing ranks, result of the step, steps lost, and the time by phase."""
    total = sum(recovery.seconds.values())
    phases = ", ".join(f"{name} {seconds:.3f}" for name, seconds in recovery.seconds.items())
    steps = "1 step lost" if recovery.lost_steps == 1 else f"{recovery.lost_steps} steps lost"
    tail = f" ({phases})" if phases else ""
    without = f" without {lost_text(losses, parked, going_on)}" if losses else ""
    what = f"step {recovery.step} {recovery.outcome}, {steps}, {total:.3f} s{tail}"
    return f"recovered at generation {generation}{without}: {what}"


def protection_line(protection: ProtectionEvent) -> str:
    """One line: when every state block had its mirrors again, how many were short of one, and for how long."""
    blocks = "1 state block was" if protection.blocks == 1 else f"{protection.blocks} state blocks were"
    steps = "1 step" if protection.steps == 1 else f"{protection.steps} steps"
    time = f"{protection.time_unprotected_s:.3f} s ({steps})"
    return f"mirrors complete with step {protection.step}: {blocks} short of one for {time}"
