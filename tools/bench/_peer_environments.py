"""Virtual environments of the peers: one each, pinned, built when first needed.

torch comes first and alone, so that no package brings a build with CUDA; everything else is installed without
dependencies, from the lists in ``requirements/peers-*.txt``. An environment is complete when its stamp, the hash of
all that went into it, is there; one that was cut short is built anew.

nvidia-resiliency-ext from 0.5 on has wheels for Python 3.12 and glibc 2.39 only. Its one compiled module times
kernels for the detection of stragglers and is not imported here. So where this Python or this glibc is older, the
files of that wheel are installed all the same; its own metadata ask for Python 3.10.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tools.bench._jobs import ROOT

__all__ = ["ENVIRONMENTS", "Environment", "ensure"]

PINS = ROOT / "requirements"
TORCH = "torch.txt"
INSTALL_SECONDS = 900


@dataclass(frozen=True)
class Environment:
    """What one peer needs beside torch."""

    name: str
    pins: tuple[str, ...]
    """Files in ``requirements/``."""
    foreign: str = ""
    """A package whose wheel declares another Python or glibc."""
    imports: str = "torch"
    """A module whose import shows that the environment is complete."""

    @property
    def stamp(self) -> str:
        """Hash of Python's version and of all pins."""
        text = sys.version + self.foreign + "".join((PINS / pins).read_text() for pins in (TORCH, *self.pins))
        return hashlib.sha256(text.encode()).hexdigest()


ENVIRONMENTS = {
    environment.name: environment
    for environment in (
        Environment("torch", ("peers-torch.txt",)),
        Environment("torchft", ("peers-torch.txt", "peers-torchft.txt"), imports="torchft"),
        Environment(
            "nvrx",
            ("peers-torch.txt", "peers-nvrx.txt"),
            foreign="nvidia-resiliency-ext==0.7.0",
            imports="nvidia_resiliency_ext.inprocess",
        ),
    )
}


def ensure(name: str, folder: Path) -> Path:
    """Return the interpreter of the environment ``name`` in ``folder``, which is built first if it is not complete.

    Raises ``RuntimeError`` with the end of the output of the command that failed.
    """
    environment, place = ENVIRONMENTS[name], folder / name
    python, stamp = place / "bin" / "python", place / "stamp"
    if stamp.exists() and stamp.read_text() == environment.stamp:
        return python
    print(f"{name}: installing into {place}", file=sys.stderr, flush=True)
    shutil.rmtree(place, ignore_errors=True)
    _run([sys.executable, "-m", "venv", str(place)])
    pip = [str(python), "-m", "pip", "install", "--quiet", "--no-deps"]
    index = os.environ.get("MEGATRON_ELASTIC_TORCH_INDEX")
    _run([*pip, *(["--index-url", index] if index else []), "-r", str(PINS / TORCH)])
    for pins in environment.pins:
        _run([*pip, "-r", str(PINS / pins)])
    if environment.foreign:
        wheel = ("--platform", "manylinux_2_39_x86_64", "--python-version", "3.12", "--only-binary", ":all:")
        site = place / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
        _run([*pip, *wheel, "--target", str(site), environment.foreign])
    _run([str(python), "-c", f"import torch, {environment.imports}"])
    stamp.write_text(environment.stamp)
    return python


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_SECONDS, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: exit code {done.returncode}\n{(done.stdout + done.stderr)[-2000:]}")
