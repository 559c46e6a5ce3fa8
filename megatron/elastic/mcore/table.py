"""The whole patch table of a run with ``--elastic`` on a CPU: the platform's rows and the engine's.

    python -m megatron.elastic.mcore.table
"""

from __future__ import annotations

from megatron.elastic.config import ElasticConfig
from megatron.elastic.mcore.patches import Patch, describe
from megatron.elastic.platform.cpu import CpuPlatform

__all__ = ["whole_table"]


def whole_table() -> tuple[Patch, ...]:
    """All rows, in the order they are applied. Imports Megatron (after readying the platform)."""
    platform = CpuPlatform()
    platform.prepare()
    from argparse import Namespace

    from megatron.elastic.mcore import host
    from megatron.elastic.mcore.startup import Startup

    return (*Startup(platform).rows(), *host.patches(Namespace(), ElasticConfig()))


if __name__ == "__main__":
    print(describe(whole_table()))
