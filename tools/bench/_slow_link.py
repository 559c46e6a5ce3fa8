"""A benchmark behind one slow link: a network namespace of its own, whose loopback passes a limited rate."""

from __future__ import annotations

import os
import shlex
import shutil
import sys

__all__ = ["behind_a_slow_link"]

INSIDE = "BENCH_BEHIND_A_SLOW_LINK"


def behind_a_slow_link(gbit: float, bench: str) -> None:
    """Begin ``bench`` again in a namespace whose loopback passes ``gbit`` Gbit/s (token bucket); not at 0.

    Raises ``SystemExit`` where none can be made.
    """
    if not gbit or os.environ.get(INSIDE):
        return
    if os.geteuid() != 0 or not (shutil.which("ip") and shutil.which("tc")):
        raise SystemExit("--gbit wants root and the programs ip and tc (Debian: iproute2)")
    shape = f"tc qdisc add dev lo root tbf rate {gbit}gbit burst 256kb latency 50ms"
    again = shlex.join([sys.executable, "-m", f"tools.bench.{bench}", *sys.argv[1:]])
    os.environ[INSIDE] = "1"
    os.execvp("unshare", ["unshare", "--net", "sh", "-ec", f"ip link set lo up; {shape}; exec {again}"])
