"""Show on this machine's devices what the engine does there, in one JSON and one Markdown report.

    python -m tools.proof --platform cuda --out out/proof [--short] [--sections kills rejoin]

Exit status 1 if a section failed. A section that the machine does not allow says so and fails nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron.elastic.platform.visible_devices import number_on_machine
from tools.bench._jobs import ROOT
from tools.proof import report
from tools.proof.machine import Machine, on_platform
from tools.proof.sections import SECTIONS, Settings

_VISIBLE = {"cuda": "CUDA_VISIBLE_DEVICES", "npu": "ASCEND_RT_VISIBLE_DEVICES"}


def one_device(platform: str, chosen: str | None, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the variable that leaves one device visible: ``chosen`` (NAME=VALUE), else the first that is visible now.

    Raises ``ValueError`` for a platform whose variable is not known, without ``chosen``.
    """
    if not chosen and platform in _VISIBLE:
        return {_VISIBLE[platform]: number_on_machine(0, _VISIBLE[platform], environ)}
    name, _, value = (chosen or "").partition("=")
    if not name:
        raise ValueError(f"--one-device: which variable leaves one device of {platform} visible?")
    return {name: value}


def devices_of(platform: str) -> int:
    """Return the number of devices, counted in a process of its own. Raises ``RuntimeError`` with its last line."""
    count = "from megatron.elastic.platform.select import select; p = select(); p.prepare(); print(p.device_count())"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", count],
        cwd=ROOT,
        env=on_platform(platform),
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(done.stderr.strip().splitlines()[-1])
    return int(done.stdout.splitlines()[-1])


def prove(machine: Machine, settings: Settings, names: list[str]) -> dict[str, Any]:
    """Run the sections ``names`` and return the report; it is written after each of them."""
    began = time.monotonic()
    found: dict[str, Any] = {
        "platform": machine.platform,
        "began": time.strftime("%Y-%m-%d %H:%M:%S %Z"),
        "devices": machine.devices,
        "seconds": 0.0,
        "sections": {},
    }
    for name in names:
        started = time.monotonic()
        print(f"[proof] {name}", file=sys.stderr, flush=True)
        figures = SECTIONS[name](machine, settings)
        found["sections"][name] = {**figures, "seconds": time.monotonic() - started}
        found["seconds"] = time.monotonic() - began
        report.write(found, machine.folder)
    return found


def main() -> None:
    """See the module docstring."""
    parser = argparse.ArgumentParser(prog="python -m tools.proof", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--platform", required=True, help="cuda, npu, or module:Class of a Platform")
    parser.add_argument("--one-device", metavar="NAME=VALUE", help="leaves one device visible (default: the first)")
    parser.add_argument("--out", type=Path, required=True, help="a new folder for reports, outputs and checkpoints")
    parser.add_argument("--plain-alone", action="store_true", help="plain Megatron has no library for several devices")
    parser.add_argument("--short", action="store_true", help="one case of each kind")
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    options = parser.parse_args()
    try:
        one = one_device(options.platform, options.one_device)
    except ValueError as error:
        parser.error(str(error))
    if options.out.exists() and any(options.out.iterdir()):
        parser.error(f"--out {options.out}: the folder is not empty")
    if set(options.sections) & {"kills"} and "parity" not in options.sections:
        parser.error("--sections kills: its checkpoint is made by parity, name it too")
    try:
        devices = devices_of(options.platform)
    except RuntimeError as error:
        parser.error(f"--platform {options.platform}: {error}")
    options.out.mkdir(parents=True, exist_ok=True)
    machine = Machine(options.platform, devices, one, options.out.resolve())
    settings = replace(Settings.short() if options.short else Settings(), plain_alone=options.plain_alone)
    found = prove(machine, settings, options.sections)
    verdicts = {name: figures["passed"] for name, figures in found["sections"].items()}
    print(json.dumps({"report": os.fspath(machine.folder / "report.md"), "passed": verdicts}))
    sys.exit(int(False in verdicts.values()))


if __name__ == "__main__":
    main()
