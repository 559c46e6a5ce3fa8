"""A job's status for people: the lines of ``ctl status``, the line of progress, and the summary of a run."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from megatron.elastic.control.answers import HistoryStatus, JobStatus, ProgressStatus, ReshapeStatus
from megatron.elastic.control.observations import ExpertLoads, Recovered
from megatron.elastic.observe.summary import ranks_text

__all__ = ["duration", "progress_line", "status_lines", "summary_lines"]

_SHOWN = 5
_LABEL = 12


def duration(seconds: float) -> str:
    """``0.184 s``, ``12.3 s``, ``4 min 5 s``, ``3 h 20 min`` or ``2 d 4 h``; no finite number is ``not known``."""
    if not math.isfinite(seconds):  # a sum of times that workers told
        return "not known"
    if seconds < 10.0:
        return f"{seconds:.3f} s"
    if seconds < 100.0:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    for size, unit, smaller, small in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= size:
            rest = whole % size // smaller
            return f"{whole // size} {unit}" + (f" {rest} {small}" if rest else "")
    raise AssertionError("durations below a minute are handled above")


def _whole(seconds: float) -> str:
    """As :func:`duration`, without fractions of a second: ``12 s``."""
    return f"{seconds:.0f} s" if seconds < 100.0 else duration(seconds)


def progress_line(status: JobStatus) -> str:
    """One line: step and rate, time left, loss, members, the state of the job, and the losses so far."""
    parts = [status.state]
    if status.progress is not None:
        parts.append(f"step {_progress(status.progress)}")
    parts.append(f"{len(status.members)} of {_launched(status)} ranks")
    past = status.history
    if past.losses:
        parts.append(_count(past.losses, "loss", "losses") + (f", MTTR {duration(past.mttr_s)}" if past.mttr_s else ""))
    if past.goodput is not None:
        parts.append(f"goodput {past.goodput:.1%}")
    return "; ".join(parts)


def status_lines(status: JobStatus) -> list[str]:
    """All that a user wants to see at a glance, one subject a line."""
    past = status.history
    step = "none committed on this node" if status.progress is None else _progress(status.progress)
    rows = [
        ("job", f"{status.run_id}: {status.state}, generation {status.generation.decided}, up {duration(status.up_s)}"),
        ("step", step),
        *_who(status),
        ("can be lost", status.tolerance.text or "not known before the first step"),
        ("moving", status.moving or "no layers"),
        *_experts(status.expert_loads),
        *_reshape(status.reshape),
        ("goodput", _goodput(past)),
        ("losses", _losses(past)),
        *_newest(status),
    ]
    if status.pending:
        rows.append(("pending", ", ".join(status.pending)))
    rows += [("here", line) for line in _here(status)]
    lines, before = [], ""
    for label, text in rows:
        lines.append(f"{label if label != before else '':<{_LABEL}}{text}")
        before = label
    return lines


def summary_lines(status: JobStatus) -> list[str]:
    """The summary of a run: steps, losses, recoveries, goodput, and the lost time by cause."""
    past, progress = status.history, status.progress
    lines = []
    if past.first_step < 0:
        lines.append("no step was committed")
    elif progress is not None:
        committed = max(0, progress.step - past.first_step + 1)
        loss = "" if progress.loss is None else f"; loss {progress.loss:.6g}"
        of = "" if progress.target is None else f" of {progress.target}"
        took = duration(past.stepping_s)
        lines.append(f"steps {past.first_step} to {progress.step}{of}: {committed} committed in {took}{loss}")
    lines.append(_losses(past))
    lines.append(f"goodput {_goodput(past)}")
    return lines


def _progress(progress: ProgressStatus) -> str:
    text = f"{progress.step}"
    if progress.target is not None:
        text += f" of {progress.target} ({progress.step / progress.target:.0%})"
    if progress.mean_step_s is not None:
        text += f", {duration(progress.mean_step_s)} a step"
    if progress.left_s:
        text += f", {duration(progress.left_s)} left"
    return text + ("" if progress.loss is None else f", loss {progress.loss:.6g}")


def _launched(status: JobStatus) -> int:
    """Ranks that have been started at least once; spares are among them."""
    return sum(each.incarnation >= 0 for each in status.ranks.values())


def _who(status: JobStatus) -> Iterable[tuple[str, str]]:
    alive = sum(node.alive for node in status.nodes.values())
    nodes = _count(alive, "node", "nodes") + (f" of {len(status.nodes)}" if alive < len(status.nodes) else "")
    yield "members", f"{len(status.members)} of {_launched(status)} ranks {ranks_text(status.members)} on {nodes}"
    by_standing: dict[str, list[int]] = {}
    for rank, each in status.ranks.items():
        if each.standing != "member" and each.incarnation >= 0:
            standing = each.standing if each.standing != "lost" or each.returns else "lost, not started again"
            by_standing.setdefault(standing, []).append(rank)
    for standing, ranks in by_standing.items():
        yield "members", f"{standing}: {ranks_text(ranks)}"
    for number, node in status.nodes.items():
        if not node.alive or node.out_s or node.finding:
            left_out = node.finding or (f"left out for {_whole(math.ceil(node.out_s))}" if node.out_s else "")
            why = left_out if node.alive else "not here"
            yield (
                "members",
                f"node {number} ({node.host}): {why}, {_count(node.losses_in_1h, 'loss', 'losses')} within an hour",
            )


def _reshape(newest: ReshapeStatus) -> Iterable[tuple[str, str]]:
    if newest.number:
        yield "reshape", f"{newest.state}: {newest.text or newest.sizes}"


def _experts(load: ExpertLoads | None) -> Iterable[tuple[str, str]]:
    if load is None:
        return
    text = f"the busiest rank has {load.imbalance:.2f} times the mean of tokens"
    if load.busiest:
        most = max(load.busiest, key=lambda one: one.ratio)
        text += f"; expert {most.expert} of layer {most.layer} has {most.ratio:.2f} times that of its layer"
    yield "experts", f"{text} (step {load.step})"


def _goodput(past: HistoryStatus) -> str:
    share = "not known" if past.goodput is None else f"{past.goodput:.2%}"
    causes = ", ".join(f"{cause} {duration(seconds)}" for cause, seconds in past.lost_s.items() if seconds)
    text = f"{share} of {duration(past.stepping_s)}"
    text += f"; lost: {causes}" if causes else "; no time lost"
    if past.unprotected_s:
        text += f"; some blocks short of a mirror for {duration(past.unprotected_s)}"
    return text


def _losses(past: HistoryStatus) -> str:
    text = _count(past.losses, "loss", "losses") + ", " + _count(past.recoveries, "recovery", "recoveries")
    if past.mttr_s is not None:
        text += f" of {duration(past.mttr_s)} on average (MTTR)"
    text += f", {_count(past.changes, 'other change', 'other changes')} of members"
    return text + (f", {_count(past.lost_steps, 'step', 'steps')} computed again" if past.lost_steps else "")


def _newest(status: JobStatus) -> Iterable[tuple[str, str]]:
    past = status.history
    for loss in past.last_losses[-_SHOWN:]:
        step = f" at step {loss.step}" if loss.step >= 0 else ""
        yield "last losses", f"{_ago(status, loss.at)} rank {loss.rank} on {loss.host}{step}: {loss.cause}"
    for recovery in past.last_recoveries[-_SHOWN:]:
        yield "recoveries", f"{_ago(status, recovery.at)} {_recovery(recovery)}"


def _recovery(recovery: Recovered) -> str:
    phases = ", ".join(f"{phase} {seconds:.3f}" for phase, seconds in recovery.seconds.items())
    ranks: Sequence[int] = recovery.lost
    without = f" without {ranks_text(ranks)}" if ranks else ""
    total = duration(sum(recovery.seconds.values()))
    return f"generation {recovery.generation}{without}, step {recovery.step} {recovery.outcome}: {total} ({phases})"


def _ago(status: JobStatus, at: float) -> str:
    seconds = status.job_s - at
    return f"{_whole(seconds)} ago:" if seconds >= 10.0 else "just now:"


def _here(status: JobStatus) -> Iterable[str]:
    """The workers of the agent's node; those that do the same are one line."""
    doing: dict[tuple[int, str, tuple[int, ...]], list[int]] = {}
    for rank, worker in status.workers_here.items():
        doing.setdefault((worker.step, worker.phase, worker.waiting_for), []).append(rank)
    for (step, phase, waiting_for), ranks in doing.items():
        waits = f", waiting for {ranks_text(waiting_for)}" if waiting_for else ""
        idle = max(status.workers_here[rank].idle_s for rank in ranks)
        still = f", for {_whole(idle)}" if idle >= 10.0 else ""
        pids = ", ".join(f"rank {rank}: pid {status.workers_here[rank].pid}" for rank in ranks[:_SHOWN])
        where = f"step {step}, " if step >= 0 else ""
        yield f"{ranks_text(ranks)} {where}{phase}{waits}{still} ({pids}{', …' if len(ranks) > _SHOWN else ''})"


def _count(number: int, one: str, several: str) -> str:
    return f"{number} {one if number == 1 else several}"
