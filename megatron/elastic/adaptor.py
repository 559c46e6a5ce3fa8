"""The import that makes a Megatron-LM script run without a GPU, and with ``--elastic`` survive the loss of ranks.

    import megatron.elastic.adaptor   # first line of any pretrain_*.py

or, without a change of the script, ``python -m megatron.elastic.launch --adapt script.py``.

The import prepares the platform (on a CPU: redirects ``torch.cuda``) and installs hooks.
When the script imports Megatron, one refuses a release that was never tested. When it imports
``megatron.training``, another replaces its argument functions, and with ``--elastic`` also
functions of the training step. This import must precede all imports of Megatron, because
Megatron binds names by value.
"""

from __future__ import annotations

import sys

from megatron.elastic.mcore.args.bad_input import install_hook
from megatron.elastic.mcore.patching import absent_imports
from megatron.elastic.mcore.patching.import_hook import after_import, before_import
from megatron.elastic.mcore.patching.releases import check_megatron, check_torch
from megatron.elastic.platform.select import select

__all__: list[str] = []


def _adapt() -> None:
    install_hook()
    check_torch()
    platform = select()
    platform.prepare()

    first = "megatron.core" not in sys.modules

    def begin() -> None:
        from megatron.elastic.mcore.patching.startup import Startup  # here: the script may never import Megatron

        Startup(platform, checked=first).begin()

    before_import("megatron.core", check_megatron)
    absent_imports.install()
    after_import("megatron.training", begin)


_adapt()
