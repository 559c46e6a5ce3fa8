"""Throughput before and after losses, emulated: the real runtime, with timed waits for kernels.

    python -m tools.bench.throughput [--cases small|table|96|tensor|all] [--only N,N] [--piece-ms 100] [--out FILE]

Each case is a job of its own under the launcher: up to 96 light processes forked
from one preloaded parent, with the runtime's control plane, communicator, engine,
state and plans; some are killed before a step. Throughput is that of committed
steps: rows a second of the steps before the loss and of those after it (the steps
that a loss interrupted are left out). A run whose waits took 2% longer than asked
for is refused: its machine was too busy to say anything.

Beside each stands the simulator's answer to the same plans. The last line is one
JSON object.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from megatron.elastic.observe.events import read_events
from megatron.elastic.simulate.cases import Case, predict
from megatron.elastic.simulate.scenarios import Scenario
from tools.bench._common import print_result
from tools.bench._jobs import LAUNCH, ROOT, faults, finished

MAX_DILATION = 0.02
BEFORE, AFTER = 3, 1
"""Measured steps on either side of the loss; one more warms up. Waits are timed, so that few tell as much as many. In
the first steps all ranks plan for losses at once, on as many cores as there are."""
SETTLING = 3
"""Steps after the loss in which copies are made anew: they begin to move after the vote of the interrupted step, and
count two or three boundaries later. Neither measured nor hidden (``unsettled_s``)."""

SMALL = tuple(
    Case(Scenario(2, 4, 8, 1, "spread", waves=4), policy) for policy in ("elaswave-split", "recycle-split", "torchft")
)
PAPER = tuple(
    Case(Scenario(2, 8, 32, 1, "spread"), policy)
    for policy in ("elaswave", "alike", "recycle", "torchft", "torchft-batch", "elaswave-split")
)
TABLE = (
    *PAPER,
    Case(Scenario(3, 8, 32, 2, "spread"), "elaswave"),
    Case(Scenario(4, 8, 32, 4, "concentrated"), "elaswave"),
)
FULL = (
    Case(Scenario(12, 8, 32, 8, "spread"), "elaswave"),
    Case(Scenario(8, 12, 32, 4, "spread"), "elaswave"),
    Case(Scenario(4, 24, 32, 1, "spread"), "elaswave"),
)
"""96 processes."""
TENSOR = tuple(
    Case(Scenario(dp, 2, 8, 1, "spread", waves=8, tp=4, lives_on=lives_on), policy)
    for dp, policy, lives_on in (
        (2, "instant", True),
        (2, "elaswave", True),
        (2, "instant", False),
        (2, "elaswave", False),
        (2, "torchft-batch", False),
        (1, "elaswave", True),
    )
)
"""One rank of TP 4 is lost: its group lives on, is parked, or its replica is dropped; a single replica lives on."""
SETS = {"small": SMALL, "table": TABLE, "96": FULL, "tensor": TENSOR, "all": (*TABLE, *FULL)}


class Refused(RuntimeError):
    """The machine was too busy for the figures to say anything."""


@dataclass(frozen=True)
class Emulation:
    """Result of a job's committed steps, and of the simulator."""

    devices: int
    before_s: float
    after_s: float
    relative: float
    """Rows a second after, over before."""
    simulated_before_s: float
    simulated_after_s: float
    simulated_relative: float
    dilation: float
    recovery_s: float
    """The step in which ranks were lost, beyond a step after it: every process plans, on far fewer cores."""
    unsettled_s: float
    """The settling steps, beyond as many measured ones."""

    def errors(self) -> tuple[float, float, float]:
        """Simulator against emulation: step before, step after, ratio."""
        return (
            self.simulated_before_s / self.before_s - 1,
            self.simulated_after_s / self.after_s - 1,
            self.simulated_relative / self.relative - 1,
        )


def emulate(case: Case) -> Emulation:
    """Run one job. Raises :class:`Refused`, ``RuntimeError`` with the job's output."""
    steps = 1 + BEFORE + 1 + SETTLING + AFTER
    with tempfile.TemporaryDirectory(prefix="emulation-") as name:
        folder = Path(name)
        _launch(case, steps, folder)
        events = read_events(folder)
        waits = {int(p.stem.split("-")[1]): json.loads(p.read_text()) for p in folder.glob("waits-*.json")}
    committed = [record for record in events if record.kind == "step"]
    needs_rebalance = [record.fields["step"] for record in events if record.kind == "migration"]
    if max(needs_rebalance, default=0) >= steps - AFTER:
        raise RuntimeError(
            f"copies were still on their way in the measured steps: they counted after {needs_rebalance}"
        )
    reporter = min(waits)
    walls = [ended - started for started, ended, _, _ in waits[reporter]]
    rows = {record.fields["step"]: record.fields["computed"] for record in committed}
    if set(rows) != set(range(1, steps + 1)):
        raise RuntimeError(f"steps {sorted(rows)} were committed, {steps} were asked for")
    first, later = slice(1, 1 + BEFORE), slice(steps - AFTER, steps)
    asked, spent = (
        sum(step[i] for log in waits.values() for part in (first, later) for step in log[part]) for i in (2, 3)
    )
    dilation = spent / asked - 1
    if dilation > MAX_DILATION:
        raise Refused(f"waits took {dilation:.1%} longer than asked for (limit {MAX_DILATION:.0%})")
    before, after = median(walls[first]), median(walls[later])
    said = predict(case)
    return Emulation(
        devices=case.scenario.dp * case.scenario.pp * case.scenario.tp,
        before_s=before,
        after_s=after,
        relative=(rows[steps] / after) / (rows[1] / before),
        simulated_before_s=said.before_s,
        simulated_after_s=said.after_s,
        simulated_relative=said.relative,
        dilation=dilation,
        recovery_s=walls[1 + BEFORE] - after,
        unsettled_s=sum(walls[2 + BEFORE : steps - AFTER]) - SETTLING * after,
    )


def _launch(case: Case, steps: int, folder: Path) -> None:
    """One job, to its end. Raises ``RuntimeError``."""
    lost = "|".join(map(str, case.lost_ranks()))
    script = f"kill:rank={lost},step={2 + BEFORE},point=before_step"
    count = case.scenario.dp * case.scenario.pp * case.scenario.tp
    job = [
        sys.executable,
        "-m",
        LAUNCH,
        "--nproc-per-node",
        str(count),
        "--no-respawn",
        "--preload",
        "torch,torch.distributed,tools.bench.emulated",
        str(ROOT / "tools/bench/emulated.py"),
        "--elastic",
        "--case",
        case.to_json(),
        "--steps",
        str(steps),
        "--second",
        repr(case.seconds_per_ns()),
        "--out",
        str(folder),
        "--elastic-event-log",
        str(folder),
        "--elastic-detection-timeout",
        "60",
        "--elastic-verify-interval",
        "0",
        "--elastic-fail-slow",
        "off",
        "--elastic-migrate-after",
        "-1",
        "--elastic-tensor",
        "live-on" if case.scenario.lives_on else "park",
        *faults(script),
    ]
    finished(job, 580.0)


def title(case: Case) -> str:
    """One line for the table."""
    s = case.scenario
    group = "" if s.tp == 1 else f" x TP {s.tp}, group {'lives on' if s.lives_on else 'parked'}"
    return f"DP {s.dp:2} x PP {s.pp:2}{group}, {s.layers} layers, {s.losses} lost {s.pattern:12} {case.policy:14}"


def run(case: Case) -> dict[str, object]:
    """One row of the table, printed."""
    started = time.monotonic()
    try:
        result = emulate(case)
    except Refused as refusal:
        print(f"{title(case)} refused: {refusal}", flush=True)
        return {"case": title(case), "refused": str(refusal)}
    print(
        f"{title(case)} {result.relative:6.3f} of before, simulated {result.simulated_relative:6.3f}; "
        f"step {result.before_s:6.2f} -> {result.after_s:6.2f} s (simulated {result.simulated_before_s:6.2f} -> "
        f"{result.simulated_after_s:6.2f}); waits +{result.dilation:.2%}; {time.monotonic() - started:.0f} s",
        flush=True,
    )
    return {"case": title(case), **asdict(result), "errors": result.errors()}


def main() -> None:
    """Parse, run, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", choices=sorted(SETS), default="small")
    parser.add_argument("--only", help="numbers of cases in the set, comma-separated, from 0")
    parser.add_argument("--piece-ms", type=float, default=100.0, help="length of the shortest wait")
    parser.add_argument("--out", type=Path, help="add the rows to this JSON file, and summarise all of it")
    options = parser.parse_args()
    cases = [Case(case.scenario, case.policy, options.piece_ms) for case in SETS[options.cases]]
    if options.only:
        cases = [cases[int(number)] for number in options.only.split(",")]
    kept: list[dict[str, object]] = []
    if options.out and options.out.exists():
        kept = json.loads(options.out.read_text())
    rows = {str(row["case"]): row for row in kept}
    for case in cases:
        rows[title(case)] = run(case)
        if options.out:
            options.out.write_text(json.dumps(list(rows.values()), indent=1))
    measured = [row for row in rows.values() if "refused" not in row]
    print_result("throughput", {"rows": list(rows.values()), **_summary(measured)})


def _summary(rows: Sequence[dict[str, object]]) -> dict[str, object]:
    """Median and worst absolute error of the simulator over measured rows."""
    if not rows:
        return {"median_error": None}
    errors = [row["errors"] for row in rows]
    steps = [abs(value) for error in errors for value in error[:2]]  # type: ignore[index]
    ratios = [abs(error[2]) for error in errors]  # type: ignore[index]
    return {
        "cases": len(rows),
        "median_error": median(steps),
        "worst_error": max(steps),
        "median_error_of_ratio": median(ratios),
        "worst_error_of_ratio": max(ratios),
    }


if __name__ == "__main__":
    main()
