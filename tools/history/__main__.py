"""Judge the event log of a job: ``python -m tools.history FOLDER``.

Reads the files that ``--elastic-event-log FOLDER`` left, one a rank, and decides whether they tell one history. Each
step is committed once and uses its samples once, in the order of the data set. Nothing is undone, and no rank acts in a
void generation. The rules are in ``tools/history/judge.py``. The program imports nothing of the engine.

Prints one line a violation, with ranks, step and file line, and one JSON object as the last line. Exit status: 0
without violations, 1 with some, 2 if the folder cannot be read.

    python -m tools.history events
    python -m tools.history events --exact --reference undisturbed/events
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from tools.history.judge import Rules, Verdict, compare, judge
from tools.history.lines import Life, Line, Log, Unreadable, read

__all__ = ["launches", "main"]


def launches(log: Log) -> dict[str, list[Line]]:
    """Return the lines of each launch by its name, in the order of the files.

    Raises :class:`Unreadable` if two launches have one name.
    """
    runs: dict[str, list[Line]] = defaultdict(list)
    under_way: dict[str, str] = {}
    begun: set[tuple[str, Life]] = set()
    for line in log.lines:
        if line.kind == "begin":
            run = str(line.fields["run"])
            if (run, line.life) in begun:
                text = f"{line}: {line.life} of run {run} begins for the second time"
                raise Unreadable(f"{text}: give each launch an --elastic-event-log of its own")
            begun.add((run, line.life))
            under_way[line.file] = run
        runs[under_way.get(line.file, "")].append(line)
    return dict(runs)


def _judged(folder: Path, rules: Rules) -> tuple[Log, dict[str, Verdict]]:
    log = read(folder)
    return log, {run: judge(lines, rules) for run, lines in launches(log).items()}


def main(arguments: Sequence[str] | None = None) -> int:
    """0: one history; 1: violations; 2: unreadable."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.history", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="the folder of --elastic-event-log")
    parser.add_argument("--exact", action="store_true", help="the job ran with --elastic-exact")
    parser.add_argument("--reference", type=Path, help="event log of another run of the job; with --exact")
    parser.add_argument("--state-mode", action="store_true", help="the job ran with --elastic-snapshot state")
    parser.add_argument("--running", action="store_true", help="the job has not ended: ranks need no end")
    asked = parser.parse_args(arguments)
    if asked.reference is not None and not asked.exact:
        parser.error("--reference compares gradient norms to the bit, which only --exact promises")
    rules = Rules(asked.exact, asked.state_mode, asked.running)
    try:
        log, verdicts = _judged(asked.folder, rules)
        references = [] if asked.reference is None else list(_judged(asked.reference, rules)[1].values())
    except Unreadable as error:
        print(f"history: {error}", file=sys.stderr)
        return 2
    said = [str(one) for verdict in verdicts.values() for one in verdict.violations]
    said += [line for verdict in verdicts.values() for other in references for line in compare(verdict, other)]
    for text in said:
        print(text)
    print(
        json.dumps({"folder": str(asked.folder), "cut_lines": log.cut, **_summary(verdicts), "violations": len(said)})
    )
    return 1 if said else 0


def _summary(verdicts: dict[str, Verdict]) -> dict[str, object]:
    all_of = list(verdicts.values())
    return {
        "launches": len(all_of),
        "incarnations": sum(one.lives for one in all_of),
        "losses": sum(one.losses for one in all_of),
        "generations": sum(one.generations for one in all_of),
        "steps": sum(len(one.facts) for one in all_of),
        "replaced": sum(one.replaced for one in all_of),
        "computed_again": sum(one.computed_again for one in all_of),
        "left_out": sum(one.left_out for one in all_of),
        "unended": [life for one in all_of for life in one.unended],
        "fingerprints": [one.fingerprint for one in all_of],
    }


if __name__ == "__main__":
    sys.exit(main())
