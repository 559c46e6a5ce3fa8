"""The whole patch table of a run with ``--elastic`` on a CPU: the platform's rows and the engine's.

python -m megatron.elastic.mcore.patching.table
"""

from __future__ import annotations

from megatron.elastic.config import ElasticConfig
from megatron.elastic.mcore.patching.patches import Patch, describe
from megatron.elastic.platform.cpu import CpuPlatform

__all__ = ["whole_table"]


def whole_table() -> tuple[Patch, ...]:
    """All rows, in the order they are applied. Imports Megatron (after readying the platform)."""
    platform = CpuPlatform()
    platform.prepare()
    from argparse import Namespace

    from megatron.elastic.mcore.loop import training_loop
    from megatron.elastic.mcore.patching.startup import Startup

    return (*Startup(platform).rows(), *training_loop.patches(Namespace(), ElasticConfig()))


if __name__ == "__main__":
    print(describe(whole_table()))
