"""Run one scenario: ``python -m tests.scenario TEXT --as model|cluster|job``."""

from __future__ import annotations

import argparse
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from megatron.elastic.config import ConfigError
from tests.scenario import in_cluster, in_job, in_model
from tests.scenario.scenario import Scenario, parse


def main() -> int:
    """Print how the scenario ends; 1 if a claim does not hold, 2 if the text or the way does not fit it."""
    parser = argparse.ArgumentParser(prog="python -m tests.scenario", description=main.__doc__)
    parser.add_argument("text", help="see tests/scenario/scenario.py")
    parser.add_argument("--as", dest="way", choices=("model", "cluster", "job"), default="cluster")
    parser.add_argument("--seeds", type=int, default=1, help="orders of events in a cluster, from the text's seed on")
    parser.add_argument("--folder", type=Path, help="where a job's output and events go (default: a temporary one)")
    asked = parser.parse_args()
    try:
        scenario = parse(asked.text)
        for number in range(asked.seeds if asked.way == "cluster" else 1):
            one = replace(scenario, seed=scenario.seed + number)
            print(f"{_play(one, asked.way, asked.folder)}: {one}", flush=True)
    except AssertionError as error:
        print(f"{error}\n{'; '.join(getattr(error, '__notes__', ()))}", file=sys.stderr)
        return 1
    except (ConfigError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def _play(scenario: Scenario, way: str, folder: Path | None) -> str:
    if way == "model":
        return in_model.play(scenario)
    if way == "cluster":
        return in_cluster.play(scenario)
    if folder is not None:
        return in_job.play(scenario, folder)
    with tempfile.TemporaryDirectory(prefix="scenario") as made:
        return in_job.play(scenario, Path(made))


if __name__ == "__main__":
    sys.exit(main())
