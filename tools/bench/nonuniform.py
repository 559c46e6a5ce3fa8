"""Throughput lost with devices missing, in the setting of nonuniform tensor parallelism (arXiv 2504.06095).

    python -m tools.bench.nonuniform [--draws 10]

Simulated: 32,768 devices, tensor-parallel size 32, 4e-3 of the devices failed at random places, and fewer. Each way to
go on answers the same draws (``megatron/elastic/simulate/nonuniform.py``). The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import asdict, replace
from typing import Any

from megatron.elastic.simulate.nonuniform import NTP, WAYS, throughput_kept
from tools.bench._common import median_of, print_result

SHARES = (1e-3, 2e-3, 4e-3)
"""Of devices that have failed."""
PUBLISHED = {
    "dropping replicas, damage packed at a restart": 0.12,
    "ntp": 0.03,
    "ntp with power": 0.01,
}
"""Upper limits of the loss that the paper reports for up to 4e-3."""


def row(way: str, failed: float, draws: int) -> dict[str, Any]:
    """Loss of one way over the draws."""
    started = time.process_time()
    losses = [1 - kept for kept in throughput_kept(way, replace(NTP, failed=failed), range(draws))]
    return {
        "way": way,
        "failed": failed,
        "lost": median_of(losses),
        "mean_lost": sum(losses) / draws,
        "published": PUBLISHED.get(way),
        "seconds_a_draw": (time.process_time() - started) / draws,
    }


def main() -> None:
    """Simulate, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--draws", type=int, default=10, help="places of failed devices drawn for each share")
    options = parser.parse_args()
    rows = [row(way, failed, options.draws) for failed in SHARES for way in WAYS]
    for found in rows:
        print(f"{found['failed']:7.0e} {found['way']:48}{found['mean_lost']:8.4f}", flush=True)
    print_result("nonuniform", {"setting": asdict(NTP), "draws": options.draws, "rows": rows})


if __name__ == "__main__":
    main()
