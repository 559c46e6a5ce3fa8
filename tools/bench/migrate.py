"""Layers that move to other workers after a loss: cost for the steps, beside moving the same bytes at once.

    python -m tools.bench.migrate [--trials 3] [--link tcp] [--gbit 1] [--hidden 512] [--seq 32] [--batch 16]
                                  [--waiting 0.1]

Per trial four real jobs under the launcher, PP 2 x DP 2: each ownership, interleaved and contiguous, moving in the
background and blocking. Rank 3 is killed and not started again; its copies are made anew, then come quiet steps, then
its replica is cut anew, then quiet steps follow. A movement is compared with the steps of its own job.

With ``--gbit R`` (root, programs ip and tc) everything runs in a network namespace of
its own, whose loopback passes R Gbit/s (token bucket): links as slow as between hosts,
but one medium for all ranks. Without it TCP moves bytes about as fast as the
processors copy them, so that a transfer costs processor time.

With ``--waiting S`` every forward and every backward waits S seconds besides, as a host does whose accelerator
computes: its cores are free for transfers. Without it a transfer takes the processor from a rank that computes.

From the event logs, for the movement with which layers change place:

bytes       state that came to ranks in added copies, all ranks together, and to the busiest rank
background  seconds from the first byte to the end of the step whose vote names the new placement, the stall not among
            them, and the steps committed in it
stall       wait of the slowest rank for it in that step, and its parts: the last bytes, before shipping (finish);
            plan, modules and groups, after the vote (switch); certificate, after the gather
longer      what the steps of the background, that of the vote with them, took longer than the median of the quiet
            ones before them
first       what the first step of the new cut took longer than the median of the quiet ones after it
exposed     longer and first
share       exposed, as a share of moving the bytes over an idle link: the busiest rank's over a link of its own, with
            ``--gbit`` all ranks' over the one there is (bandwidth: the same run, two processes, 64 MiB)
step        the quiet step before, and how far one such step is from the next (median of the distances from the median)
of_blocking exposed in the background, as a share of the exposed time when all ranks wait for the same movement

The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from megatron.elastic.observe.events import EventRecord, read_events
from tools.bench._common import Spread, median_of, print_result
from tools.bench._jobs import command, faults, finished, waits
from tools.bench._movement import (
    Paid,
    add_options,
    begin,
    link_bandwidth,
    model_of,
    paid,
    settings_of,
)

WORLD, RANK, AT = 4, 3, 3
PATIENCE = 8
"""Steps from the loss to the movement: two to four make copies anew, the others are quiet."""
STEPS = AT + PATIENCE + 7
"""Two or three of the last seven are those of the movement."""
PARTS = ("finish", "switch", "certificate")


@dataclass(frozen=True)
class Moved(Paid):
    """One movement of one job; the parts of its wait, in seconds."""

    finish: float
    switch: float
    certificate: float


def job(options: argparse.Namespace, *flags: str) -> list[EventRecord]:
    """Events of one job. Raises ``RuntimeError`` with its output when it does not finish."""
    with tempfile.TemporaryDirectory() as folder:
        pipeline = ("--pipeline-model-parallel-size", "2", "--train-iters", "1000", "--exit-interval", str(STEPS))
        elastic = ("--elastic", "--no-elastic-respawn", "--elastic-migrate-after", str(PATIENCE))
        links = ("--elastic-transport", options.link, "--elastic-event-log", folder)
        script = [f"kill:rank={RANK},step={AT},point=before_step", *waits(options.waiting)]
        finished(command(WORLD, *model_of(options), *pipeline, *elastic, *links, *faults(";".join(script)), *flags))
        return read_events(Path(folder))


def recut_at(records: list[EventRecord]) -> int:
    """The step whose vote has layers change place. Raises ``RuntimeError`` when none did."""
    plans = [record.fields for record in records if record.kind == "plan" and record.fields["step"] >= AT]
    cuts = {tuple(map(tuple, plan["stages"])): plan["step"] for plan in reversed(plans)}
    if len(cuts) != 2:
        raise RuntimeError(f"one change of pipelines was expected after the loss, there are {len(cuts) - 1}")
    return int(max(cuts.values()))


def evaluated(records: list[EventRecord], bandwidth: float, shared: bool) -> Moved:
    """The re-cut of one job. ``shared``: one link for all ranks."""
    end = recut_at(records)
    moved = [r for r in records if r.kind == "migration" and r.fields["step"] == end]
    parts = {part: max(r.fields["seconds"][part] for r in moved) for part in PARTS}
    return Moved(**asdict(paid(records, end, bandwidth, shared, settled=AT)), **parts)


def main() -> None:
    """Parse, run, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_options(parser)
    options = parser.parse_args()
    begin(options, "migrate")
    variants = [(ownership, how) for ownership in ("interleaved", "contiguous") for how in ("background", "blocking")]
    found: dict[tuple[str, str], list[Moved]] = {variant: [] for variant in variants}
    bandwidths = []
    for _ in range(options.trials):
        bandwidths.append(link_bandwidth(options.link))
        for (ownership, how), moved in found.items():
            records = job(options, "--elastic-ownership", ownership, "--elastic-migration", how)
            moved.append(evaluated(records, bandwidths[-1], bool(options.gbit)))
            print(ownership, how, moved[-1], file=sys.stderr, flush=True)
    figures: dict[str, dict[str, Spread]] = {
        f"{ownership}_{how}": {
            item.name: median_of([getattr(each, item.name) for each in moved]) for item in fields(Moved)
        }
        for (ownership, how), moved in found.items()
    }
    of_blocking = {
        ownership: median_of(
            [
                one.exposed / other.exposed
                for one, other in zip(found[ownership, "background"], found[ownership, "blocking"], strict=True)
            ]
        )
        for ownership in ("interleaved", "contiguous")
    }
    measured = {"link_bytes_a_second": median_of(bandwidths)}
    print_result("migrate", {**settings_of(options), **measured, **figures, "of_blocking": of_blocking})


if __name__ == "__main__":
    main()
