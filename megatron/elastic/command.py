"""The console command ``megatron-elastic``: one word for each program of this package.

    megatron-elastic launch --nproc-per-node 8 pretrain_mine.py --elastic ...
    megatron-elastic check --nproc-per-node 8 pretrain_mine.py --elastic ...
    megatron-elastic ctl status
    megatron-elastic files

Invariant: ``launch``, ``ctl`` and ``simulate`` are the modules of those names, with the same arguments and exit
statuses as under ``python -m``; nothing else is imported before one of them runs.
"""

from __future__ import annotations

import runpy
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

__all__ = ["files", "main"]

_MODULES = {
    "launch": "start a training",
    "ctl": "ask or steer a running one",
    "simulate": "estimate a fleet with losses",
}
_OTHERS = {
    "check": "as launch, with --elastic-check: say all that is wrong with the flags, train nothing",
    "files": "print the folder of pretrain_gpt.py, launch scripts and examples",
}
_USAGE = "usage: megatron-elastic COMMAND [ARGUMENTS]\n\n" + "\n".join(
    f"  {name:<9} {text}" for name, text in sorted({**_MODULES, **_OTHERS}.items())
)


def files() -> Path:
    """Return the folder of ``pretrain_gpt.py``, ``scripts`` and ``examples``: the checkout's, else the installed one.

    Raises ``FileNotFoundError`` if the package was installed without them.
    """
    checkout = Path(__file__).resolve().parents[2]
    installed = Path(sysconfig.get_path("data")) / "share" / "megatron-elastic"
    for folder in (checkout, installed):
        if (folder / "pretrain_gpt.py").is_file():
            return folder
    raise FileNotFoundError(f"{installed} is missing: install megatron-elastic from its wheel, or use a checkout")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return its exit status."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    name = words[0] if words else ""
    if name in ("-h", "--help"):
        print(_USAGE)
        return 0
    if name not in {**_MODULES, **_OTHERS}:
        print(f"error: {name or 'no command'}: choose {', '.join(sorted({**_MODULES, **_OTHERS}))}", file=sys.stderr)
        return 1
    if name == "files":
        return _print_files()
    module, more = ("launch", ["--elastic-check"]) if name == "check" else (name, [])
    sys.argv = [f"megatron-elastic {name}", *words[1:], *more]
    runpy.run_module(f"megatron.elastic.{module}", run_name="__main__", alter_sys=True)
    return 0


def _print_files() -> int:
    try:
        print(files())
    except FileNotFoundError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
