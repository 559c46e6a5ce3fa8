"""The JSON object of ``tools.bench.peers``, from the results of its trials; a later part of it in an earlier object.

Each fault's figures say when they were measured and at which load of the machine, so that an object can have parts of
several runs. Ratios of times to recover are made from what the object has.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from tools.bench._common import Spread, median_of
from tools.bench._peer_contenders import CONTENDERS
from tools.bench._peer_figures import deviation
from tools.bench.peers_programs.layouts import LAYOUTS, PLAIN

__all__ = ["merged", "summary"]

Result = Mapping[str, Any]
MEASURED = ("mttr_s", "whole_after_s", "rejoin_stall_s", "throughput_without", "normal_step_s")
COUNTED = ("steps_undone", "steps_discarded", "rows_lost")


def summary(results: Sequence[Result]) -> dict[str, Any]:
    """Return figures by contender and fault, and the ratios of times to recover; the same for each further layout."""
    plain = [result for result in results if _layout(result) == PLAIN.name]
    calm = [result for result in plain if result["fault"] == "calm"]
    baselines = {
        name: median_of([result["step_s"] for result in calm if result["contender"] == name])
        for name in ("plain", "megatron")
        if any(result["contender"] == name for result in calm)
    }
    layouts = {}
    for name in LAYOUTS:
        own = [result for result in results if _layout(result) == name]
        if own and name != PLAIN.name:
            layouts[name] = {"title": LAYOUTS[name].title, **_rows(own)}
    return {"baseline_step_s": baselines, **_rows(plain), "layouts": layouts}


def merged(recorded: Mapping[str, Any], later: Mapping[str, Any]) -> dict[str, Any]:
    """Return the object ``recorded`` with the contenders' faults of ``later`` in place of its own.

    Raises ``ValueError`` where both are not of the same model, ranks, limits and versions.
    """
    for name in ("model", "ranks", "calm_steps", "versions"):
        if recorded[name] != later[name]:
            raise ValueError(f"{name}: {recorded[name]} is recorded, {later[name]} was measured")
    layouts = dict(recorded.get("layouts", {}))
    for name, part in later["layouts"].items():
        layouts[name] = _merged_rows(layouts.get(name, {"contenders": {}}), part)
    return {**_merged_rows(recorded, {"contenders": later["contenders"]}), "layouts": layouts}


def _merged_rows(recorded: Mapping[str, Any], later: Mapping[str, Any]) -> dict[str, Any]:
    found = {**recorded, **later}
    rows = dict(recorded["contenders"])
    for name, row in later["contenders"].items():
        before = rows.get(name, {"faults": {}})
        faults = {**before["faults"], **row["faults"]}
        told = {key: value for key, value in row.items() if value is not None}
        rows[name] = {**row, **before, **told, "faults": faults}
    ordered = {name: rows[name] for name in CONTENDERS if name in rows}
    return {**found, "contenders": ordered, "best_mttr_s": _best(ordered)}


def _layout(result: Result) -> str:
    return str(result.get("layout", PLAIN.name))


def _rows(results: Sequence[Result]) -> dict[str, Any]:
    names = [name for name in CONTENDERS if any(result["contender"] == name for result in results)]
    rows = {name: _contender(name, results) for name in names}
    return {"contenders": rows, "best_mttr_s": _best(rows)}


def _contender(name: str, results: Sequence[Result]) -> dict[str, Any]:
    contender = CONTENDERS[name]
    own = [result for result in results if result["contender"] == name]
    calm = {result["number"]: result for result in own if result["fault"] == "calm"}
    undisturbed: Result = calm.get(0) or next(
        (r for r in results if _is(r, contender.baseline, "calm")), {"losses": {}}
    )
    losses = {int(step): loss for step, loss in undisturbed["losses"].items()}
    faults = {fault: _fault([r for r in own if r["fault"] == fault], losses) for fault in contender.faults}
    return {
        "title": contender.title,
        "own": contender.own,
        "caveats": contender.caveats,
        "coordinator": contender.coordinator,
        "without_coordinator": contender.without_coordinator,
        "of_layouts": contender.of_layouts,
        "overhead": _overhead(contender.baseline, calm, results),
        "step_s": median_of([result["step_s"] for result in calm.values()]) if calm else None,
        "faults": {fault: figures for fault, figures in faults.items() if figures},
    }


def _is(result: Result, contender: str, fault: str) -> bool:
    return bool(result["contender"] == contender and result["fault"] == fault)


def _overhead(baseline: str, calm: Mapping[int, Result], results: Sequence[Result]) -> Spread | None:
    """Step over the baseline's step of the same round, less 1."""
    base = {r["number"]: r["step_s"] for r in results if r["contender"] == baseline and r["fault"] == "calm"}
    ratios = [result["step_s"] / base[number] - 1 for number, result in calm.items() if number in base]
    return median_of(ratios) if ratios else None


def _fault(results: Sequence[Result], calm: Mapping[int, float]) -> dict[str, Any]:
    """Medians over the faults; of what is counted and of deviations the worst."""
    if not results:
        return {}
    figures = [one for result in results for one in result["figures"]]
    found: dict[str, Any] = {"trials": len(figures), "recovered": sum(one["mttr_s"] is not None for one in figures)}
    for name in MEASURED:
        values = [one[name] for one in figures if one[name] is not None]
        found[name] = median_of(values) if values else None
    for name in COUNTED:
        found[name] = max(one[name] for one in figures)
    after = [one["rows_after"] for one in figures if one["rows_after"] is not None]
    found["batch_kept"] = min(after) / max(one["rows_before"] for one in figures) if after else None
    off = [deviation(calm, {int(s): v for s, v in r["losses"].items()}, r["struck_step"]) for r in results]
    found["loss_deviation"] = max((one for one in off if one is not None), default=None)
    found["words"] = next((result["words"] for result in results if result["words"]), "")
    found["load"] = statistics.median(result["load"] for result in results)
    found["at"] = max((result["at"] for result in results if "at" in result), default=None)
    return found


def _best(rows: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """For each fault: this runtime's time to recover, as it comes and tuned, and the shortest of all peers."""
    best: dict[str, Any] = {}
    for fault in ("kill", "stay", "rank0", "two", "stop"):
        times = {
            name: _median(row["faults"][fault]["mttr_s"])
            for name, row in rows.items()
            if fault in row["faults"] and row["faults"][fault]["mttr_s"] is not None
        }
        peers = {name: seconds for name, seconds in times.items() if not rows[name]["own"]}
        if "ours" in times and peers:
            quickest = min(peers, key=lambda name: peers[name])
            best[fault] = {
                "ours": times["ours"],
                "peer": peers[quickest],
                "which": quickest,
                "times": peers[quickest] / times["ours"],
            }
            if "ours_tuned" in times:
                tuned = times["ours_tuned"]
                best[fault] |= {"tuned": tuned, "times_tuned": peers[quickest] / tuned}
    return best


def _median(times: Spread | Mapping[str, float]) -> float:
    """Of a measured spread, or of one that was read from a file."""
    return times.median if isinstance(times, Spread) else times["median"]
