"""Names of the environment variables between the launcher and its workers.

Named once, here. Everything else a worker finds in its environment is
torchrun's (``RANK``, ``WORLD_SIZE``, ``MASTER_ADDR``, …).
"""

from __future__ import annotations

from typing import Final

__all__ = [
    "ADDRESS",
    "CONTROL_FD",
    "DOMAIN",
    "DRAIN_SIGNALS",
    "ENDED_IN",
    "ETCD_PASSWORD",
    "ETCD_USER",
    "HOST",
    "INCARNATION",
    "NEWCOMER",
    "NODE",
    "POSITION",
    "REFUSED",
    "RUN_ID",
    "SCRATCH",
    "SECRET",
    "SECRET_FILE",
    "SEGMENT_PREFIX",
    "SLOTS",
    "SLOT_FD",
    "STORE",
    "WEBHOOK",
]

SLOTS: Final = "MEGATRON_ELASTIC_SLOTS"
"""Ranks there can ever be: those of the launch (``WORLD_SIZE``), spares, and the workers of nodes that may yet come."""

NEWCOMER: Final = "MEGATRON_ELASTIC_NEWCOMER"
"""1 when the job ran already as this worker was started: it has to be admitted."""

ENDED_IN: Final = "MEGATRON_ELASTIC_ENDED_IN"
"""The step in which all ranks of the job ended before this start and told nothing of it; −1: that is not so."""

SECRET: Final = "MEGATRON_ELASTIC_SECRET"
"""Hex text, one per job: proves membership in handshakes and signatures. Given to the agents of several nodes."""

SECRET_FILE: Final = "MEGATRON_ELASTIC_SECRET_FILE"
"""A file with the secret, as ``--elastic-secret-file`` names one; read by the launcher alone."""

ETCD_USER: Final = "MEGATRON_ELASTIC_ETCD_USER"
"""User name of the launcher at an etcd that asks for one; with :data:`ETCD_PASSWORD`."""

ETCD_PASSWORD: Final = "MEGATRON_ELASTIC_ETCD_PASSWORD"
"""Of :data:`ETCD_USER`. In the environment alone: a command line is seen by others."""

WEBHOOK: Final = "MEGATRON_ELASTIC_WEBHOOK"
"""The URL of ``--elastic-webhook``, which may hold a token; read by the launcher, and not passed on to its workers."""

REFUSED: Final = "MEGATRON_ELASTIC_REFUSED"
"""1 in an ``--elastic-check`` of a job that the launcher would refuse; it prints why when the script has ended."""

STORE: Final = "MEGATRON_ELASTIC_STORE"
"""``HOST:PORT`` of the embedded store, for communicators that meet through it; empty with etcd."""

RUN_ID: Final = "MEGATRON_ELASTIC_RUN_ID"
"""The job's name (``--rdzv-id``, or made up), as ``megatron.elastic.ctl`` takes it."""

INCARNATION: Final = "MEGATRON_ELASTIC_INCARNATION"
"""0 for a rank's first life, one more for each later one."""

CONTROL_FD: Final = "MEGATRON_ELASTIC_CONTROL_FD"
"""Inherited stream socket to this node's agent."""

SLOT_FD: Final = "MEGATRON_ELASTIC_SLOT_FD"
"""Inherited memfd shared with this node's agent (:mod:`megatron.elastic.control.slot`)."""

HOST: Final = "MEGATRON_ELASTIC_HOST"
"""Name of this node; two agents on one machine have two names, because they are two nodes."""

DOMAIN: Final = "MEGATRON_ELASTIC_DOMAIN"
"""Failure domains of this node, like ``rack7/host12``. Set it where a node is started, unless the machine tells them
itself (:mod:`megatron.elastic.launch.domain`). The launcher passes the result to its workers."""

ADDRESS: Final = "MEGATRON_ELASTIC_ADDRESS"
"""Network address at which workers of other nodes reach this node: what a communicator listens on."""

NODE: Final = "MEGATRON_ELASTIC_NODE"
"""Number of this node's agent, 0 … nodes−1 (equal to ``GROUP_RANK``)."""

POSITION: Final = "MEGATRON_ELASTIC_POSITION"
"""Number of this worker among those of its node; ``LOCAL_RANK`` is 0 for all of them with ``--virtual-local-rank``."""

DRAIN_SIGNALS: Final = "MEGATRON_ELASTIC_DRAIN_SIGNALS"
"""Names of the signals that drain the job, with commas between; empty where the program is not elastic."""

SEGMENT_PREFIX: Final = "MEGATRON_ELASTIC_SEGMENT_PREFIX"
"""Shared-memory segments in /dev/shm must begin with this; the launcher removes what is left of them."""

SCRATCH: Final = "MEGATRON_ELASTIC_SCRATCH"
"""A folder for this worker's and its children's sockets of ``multiprocessing``; the launcher removes it."""
