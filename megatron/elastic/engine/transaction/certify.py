"""What one rank does about proofs: takes certificates, and stops or mends what fails them (docs/design.md §6).

A failed certificate ends the transition, and with it the job, on every rank alike. A
copy found changed by itself is dropped while another is known to be right, and made
anew with the next migration; where nobody can tell which one is right the job ends too.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import NoReturn

from megatron.elastic.engine.compute.block_checksums import Disputes
from megatron.elastic.engine.failures import SilentCorruption
from megatron.elastic.engine.transaction.certificates import (
    ALL_BYTES,
    LOOKED_AT_BYTES,
    Transition,
    examine,
    examine_memory,
    looked_at,
    name_disputes,
    statement,
)
from megatron.elastic.engine.transaction.context import Context
from megatron.elastic.state.certificate import CertificateError
from megatron.elastic.state.layout import BlockKey

__all__ = ["Certifier"]


@dataclass(frozen=True)
class Certifier:
    """Collective, all of it: every rank comes to the same end."""

    context: Context

    def certify(self, transition: Transition, moved: Iterable[BlockKey]) -> None:
        """Have everybody compare what all hold and will do. Raises ``CertificateError``."""
        at = self.context
        limit = ALL_BYTES if transition in ("start", "load") else LOOKED_AT_BYTES
        contents = looked_at(at.views.layouts, moved, at.record.version, limit)
        mine = statement(at.tools, at.view, at.record, at.parameters, contents)
        verdict = examine(at.tools, at.view, at.views.groups(at.view), mine, transition)
        at.listener.examined(at.view, verdict)
        if verdict.findings:
            raise CertificateError(verdict.findings)
        at.certificate = verdict.certificate

    def dispute(self, mine: Disputes) -> NoReturn:
        """Copies were not made as their owners' were: a bug. Raises ``CertificateError`` with everybody's."""
        at = self.context
        verdict = name_disputes(at.tools, at.view, at.record, mine)
        at.listener.examined(at.view, verdict)
        raise CertificateError(verdict.findings)

    def mend_memory(self, mine: Disputes) -> None:
        """Copies made alike differ: go on without the wrong one. Raises ``SilentCorruption`` where none can be told.

        Between the vote and the update, with no migration under way.
        """
        at = self.context
        changes, verdict = examine_memory(at.tools, at.view, at.record, mine)
        at.listener.examined(at.view, verdict)
        if not changes:
            raise SilentCorruption(f"step {at.record.version}: " + "; ".join(verdict.findings))
        for change in changes:
            if change.kind == "drop" and change.rank == at.tools.fabric.rank:
                at.tools.pool.condemn(change.block)
        at.take_configuration(replace(at.view.configuration, placement=at.view.placement.apply(changes)))
        at.needs_rebalance = True
