"""The import that makes a Megatron-LM script run without a GPU, and with ``--elastic`` survive the loss of ranks.

    import megatron.elastic.adaptor   # first line of any pretrain_*.py

or, without a change of the script, ``python -m megatron.elastic.launch --adapt script.py``.

The import prepares the platform (on a CPU: redirects ``torch.cuda``) and installs a hook.
When the script imports ``megatron.training``, the hook replaces its argument functions,
and with ``--elastic`` also functions of the training step. This import must precede all
imports of Megatron, because Megatron binds names by value.
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
