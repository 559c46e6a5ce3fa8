"""Open files: a job that runs out of descriptors half-way hangs, so their number is settled at the start.

A rank keeps two descriptors for each other rank of its host and one for each rank elsewhere;
while a link is made it has a few more. An agent keeps three for each of its workers, and
the one that serves the store the connections of all agents and ranks. Connections that have not
proved that they belong to the job take further ones. The limit is raised no further than is
needed: programs that use ``select`` cannot deal with descriptors above 1023.
"""

from __future__ import annotations

import resource

from megatron.elastic.launch.arguments import BadCommand

__all__ = ["files_needed", "raise_file_limit"]

_PROCESS, _RANK, _WORKER, _NODE = 64, 6, 4, 12
"""Descriptors of any process, and at most for each rank of the job, each worker of a node and each node."""
_STRANGERS = 192
"""The most connections without a proof in the first agent: 128 to the store, 64 to presence. A rank keeps 64."""


def files_needed(nodes: int, workers: int) -> int:
    """Open files that the largest process of a job may need, with ``workers`` on each of its ``nodes``."""
    return _PROCESS + _STRANGERS + _RANK * nodes * workers + _WORKER * workers + _NODE * nodes


def raise_file_limit(nodes: int, workers: int) -> None:
    """Let this process and those it starts have as many. Raises :class:`BadCommand` where the hard limit is lower."""
    needed = files_needed(nodes, workers)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if _below(hard, needed):
        raise BadCommand(
            f"{needed} open files are needed for {nodes * workers} ranks, and the hard limit is {hard}: raise it "
            f"(ulimit -Hn {needed}; LimitNOFILE of the service; --ulimit nofile of the container)"
        )
    if _below(soft, needed):
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def _below(limit: int, needed: int) -> bool:
    return limit != resource.RLIM_INFINITY and limit < needed
