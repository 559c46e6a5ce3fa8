"""One readable line per loss and per recovery, in the field's words.

lost tensor-parallel group {4,5}: stage 1, replica 0, at step 57; rank 5 on node-b: signal SIGKILL; rank 4 parked
recovered at generation 3: step 57 rolled forward, 0 steps lost, 0.184 s (freeze 0.021, edit 0.090, ...)
mirrors complete with step 58: 12 state blocks were short of one for 0.412 s (1 step)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from megatron.elastic.observe.events import Protection, RankLost, Recovery

__all__ = ["loss_lines", "protection_line", "ranks_text", "recovery_line"]


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


def _where(loss: RankLost) -> str:
    """``tensor-parallel group {4,5}: stage 1, replica 0`` or ``rank 4: stage 1, replica 0``."""
    group = loss.tensor_parallel_group
    name = f"tensor-parallel group {ranks_text(group)}" if len(group) > 1 else f"rank {loss.lost_rank}"
    place = []
    if loss.stage is not None:
        place.append(f"stage {loss.stage}")
    if loss.replica is not None:
        place.append(f"replica {loss.replica}")
    return f"{name}: {', '.join(place)}" if place else f"{name}: no part of a pipeline"


def _end_of(loss: RankLost) -> str:
    """``rank 5 on node-b: signal SIGKILL (last line: ...)``."""
    text = f"rank {loss.lost_rank} on {loss.host}: {loss.cause}"
    said = next((line.strip() for line in reversed(loss.last_lines) if line.strip()), "")
    if said:
        text += f" (last line: {said if len(said) <= 160 else said[:157] + '...'})"
    return text


def loss_lines(losses: Sequence[RankLost], parked: Iterable[int] = ()) -> tuple[str, ...]:
    """One line per tensor-parallel group that lost ranks, in order of rank.

    ``parked``: living ranks of those groups that compute nothing until they are used again.
    """
    cells: dict[tuple[int, ...], list[RankLost]] = {}
    for loss in sorted(losses, key=lambda one: one.lost_rank):
        cells.setdefault(loss.tensor_parallel_group or (loss.lost_rank,), []).append(loss)
    waiting = set(parked)
    lines = []
    for group, members in cells.items():
        parts = [f"lost {_where(members[0])}, at step {members[0].step}"]
        parts += [_end_of(loss) for loss in members]
        idle = sorted(waiting & set(group))
        if idle:
            parts.append(f"rank {idle[0]} parked" if len(idle) == 1 else f"ranks {ranks_text(idle)} parked")
        lines.append("; ".join(parts))
    return tuple(lines)


def recovery_line(recovery: Recovery, generation: int) -> str:
    """One line: what became of the step, how many were lost, how long it took and where."""
    total = sum(recovery.seconds.values())
    phases = ", ".join(f"{name} {seconds:.3f}" for name, seconds in recovery.seconds.items())
    steps = "1 step lost" if recovery.lost_steps == 1 else f"{recovery.lost_steps} steps lost"
    tail = f" ({phases})" if phases else ""
    return (
        f"recovered at generation {generation}: step {recovery.step} {recovery.outcome}, {steps}, {total:.3f} s{tail}"
    )


def protection_line(protection: Protection) -> str:
    """One line: when every state block had its mirrors again, how many were short of one, and for how long."""
    blocks = "1 state block was" if protection.blocks == 1 else f"{protection.blocks} state blocks were"
    steps = "1 step" if protection.steps == 1 else f"{protection.steps} steps"
    time = f"{protection.time_unprotected_s:.3f} s ({steps})"
    return f"mirrors complete with step {protection.step}: {blocks} short of one for {time}"
