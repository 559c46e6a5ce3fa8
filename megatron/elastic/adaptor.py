"""One import that makes a Megatron-LM script run without a GPU, and, with ``--elastic``, outlive lost ranks.

    import megatron.elastic.adaptor   # first line of any pretrain_*.py

or, with no line at all, ``python -m megatron.elastic.launch --adapt script.py``.

Importing it readies the platform (on a CPU: redirects ``torch.cuda``) and waits
for the script to import ``megatron.training``; only then are its argument
functions replaced, and only with ``--elastic`` anything of the training step.
Must come before any import of Megatron: Megatron binds names by value.
"""

from __future__ import annotations

from megatron.elastic.mcore.args.bad_input import install_hook
from megatron.elastic.mcore.patching.import_hook import after_import
from megatron.elastic.platform.select import select

__all__: list[str] = []


def _adapt() -> None:
    install_hook()
    platform = select()
    platform.prepare()

    def begin() -> None:
        from megatron.elastic.mcore.patching.startup import Startup  # here: the script may never import Megatron

        Startup(platform).begin()

    after_import("megatron.training", begin)


_adapt()
