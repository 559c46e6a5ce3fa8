"""Run benchmarks with the arguments of the documentation, and keep their last lines.

    python -m tools.bench.record [NAME ...]          # all of them: about an hour on two quiet cores

Each benchmark is its own command with the arguments below; its last line, one JSON
object with the machine in it, goes to ``docs/measured/NAME.json`` with the command and
the seconds it took. Figures in ``docs/`` are from these files. A benchmark that fails
or runs out of time leaves the file before it as it was.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.bench._jobs import ROOT, environment

__all__ = ["STANDARD", "Benchmark", "record"]

MEASURED = ROOT / "docs" / "measured"


@dataclass(frozen=True)
class Benchmark:
    """``module`` of ``tools.bench`` with the arguments its figures are quoted for; ``seconds`` is its limit."""

    module: str
    arguments: tuple[str, ...] = ()
    seconds: int = 600

    @property
    def command(self) -> list[str]:
        return ["python", "-m", f"tools.bench.{self.module}", *self.arguments]


STANDARD = {
    "comm": Benchmark("comm", ("--full",)),
    "edit": Benchmark("edit", ("--ranks", "8,16,32,64")),
    "edit_of_64": Benchmark("edit", ("--ranks", "64", "--ways", "native,full,partial", "--trials", "5")),
    "recovery": Benchmark("recovery"),
    "experts": Benchmark("experts", ("--losses", "8")),
    "protection": Benchmark("protection"),
    "rejoin": Benchmark("rejoin", ("--trials", "21")),
    "rejoin_of_long_steps": Benchmark("rejoin", ("--trials", "15", "--batch", "64")),
    "rejoin_waiting": Benchmark("rejoin", ("--trials", "11", "--waiting", "0.05")),
    "migrate": Benchmark("migrate", ("--gbit", "1")),
    "migrate_waiting": Benchmark(
        "migrate", ("--gbit", "1", "--seq", "8", "--batch", "4", "--waiting", "0.05", "--trials", "2")
    ),
    "migrate_loopback": Benchmark("migrate"),
    "movement": Benchmark("movement"),
    "reshape": Benchmark("reshape", ("--gbit", "1"), 1200),
    "reshape_waiting": Benchmark("reshape", ("--gbit", "1", "--seq", "8", "--batch", "4", "--waiting", "0.05"), 1200),
    "reshape_loopback": Benchmark("reshape", ("--seq", "8", "--batch", "4", "--waiting", "0.05"), 1200),
    "reshape_memory": Benchmark("reshape", ("--link", "shm", "--seq", "8", "--batch", "4", "--waiting", "0.05"), 1200),
    "reshape_behind": Benchmark(
        "reshape",
        ("--gbit", "1", "--hidden", "320", "--seq", "8", "--batch", "4", "--waiting", "0.1", "--overlap", "both"),
        1200,
    ),
    "overhead": Benchmark("overhead"),
    "overhead_of_two": Benchmark("overhead", ("--ranks", "2")),
    "overhead_of_long_steps": Benchmark("overhead", ("--batch", "64")),
    "overhead_of_wide_layers": Benchmark("overhead", ("--hidden", "512")),
    "watching": Benchmark("watching"),
    "overlap": Benchmark("overlap", ("--trials", "3", "--kernels"), 1200),
    "overlap_link": Benchmark("overlap", ("--gbit", "5", "--bucket", "65536", "--trials", "3"), 1200),
    "step_time": Benchmark("step_time"),
    "step_time_tensor": Benchmark("step_time", ("--tensor", "2")),
    "checkpoint": Benchmark("checkpoint"),
    "consistency": Benchmark("consistency"),
    "exact": Benchmark("exact", ("--hidden", "128,256")),
    "planner": Benchmark("planner"),
    "agreement": Benchmark("agreement"),
    "journal": Benchmark("journal"),
    "simulator_real": Benchmark("simulator_real"),
    "simulator_error": Benchmark("simulator_error", ("--unit-ms", "60")),
    "simulate_table": Benchmark("simulate_table"),
    "nonuniform": Benchmark("nonuniform"),
    "throughput": Benchmark("throughput", ("--cases", "table"), 1200),
    "throughput_96": Benchmark("throughput", ("--cases", "96"), 1200),
    "throughput_tensor": Benchmark("throughput", ("--cases", "tensor"), 1200),
    "dropout": Benchmark("dropout"),
    "peers": Benchmark("peers", ("--kept", "out/peers/kept"), 7200),
}


def last_object(printed: str) -> dict[str, Any]:
    """The JSON object that ends a benchmark's output. Raises ``ValueError`` when there is none."""
    lines = printed.strip().splitlines()
    found = json.loads(lines[-1]) if lines else None
    if not isinstance(found, dict):
        raise ValueError("the last line is not a JSON object")
    return found


def _printed(benchmark: Benchmark) -> str:
    """Its output on stdout. Raises ``SubprocessError``; its jobs end with it also when time is up."""
    command = [sys.executable, *benchmark.command[1:]]
    with subprocess.Popen(
        command, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as running:
        try:
            printed, _ = running.communicate(timeout=benchmark.seconds)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(running.pid, signal.SIGKILL)
    if running.returncode:
        raise subprocess.CalledProcessError(running.returncode, benchmark.command)
    return printed


def record(name: str, benchmark: Benchmark, folder: Path = MEASURED) -> str:
    """Run one benchmark and keep its figures; a line that says how it went. Raises ``RuntimeError`` when it failed."""
    started = time.monotonic()
    try:
        figures = last_object(_printed(benchmark))
    except (subprocess.SubprocessError, ValueError) as error:
        raise RuntimeError(f"{name}: {error}") from error
    took = time.monotonic() - started
    folder.mkdir(parents=True, exist_ok=True)
    kept = {"command": " ".join(benchmark.command), "took_s": round(took, 1), **figures}
    (folder / f"{name}.json").write_text(json.dumps(kept, indent=1) + "\n")
    return f"{name}: {took:.0f} s"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(STANDARD)}; default: all")
    names = parser.parse_args().names or list(STANDARD)
    unknown = [name for name in names if name not in STANDARD]
    if unknown:
        parser.error(f"no benchmark {unknown[0]!r}: choose from {', '.join(STANDARD)}")
    failed = 0
    for name in names:
        try:
            print(record(name, STANDARD[name]), flush=True)
        except RuntimeError as error:
            failed += 1
            print(error, file=sys.stderr, flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
