"""Certificates of one rank, and the repair of changed memory (docs/design.md §6).

A failed certificate ends the job on every rank. That of an admission between two steps is
exchanged while the next step is computed, and examined before its vote. A copy whose memory changed is dropped if
another copy is known to be right, and the next migration makes it anew. If the right copy
cannot be told from the wrong one, the job ends.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import NoReturn

from megatron.elastic.engine.compute.block_checksums import Disputes
from megatron.elastic.engine.failures import SilentCorruption
from megatron.elastic.engine.transaction.certificates import (
    ALL_BYTES,
    LOOKED_AT_BYTES,
    Examination,
    Transition,
    begin_examination,
    examine_memory,
    looked_at,
    name_disputes,
    statement,
)
from megatron.elastic.engine.transaction.context import Context
from megatron.elastic.state.certificate import CertificateError
from megatron.elastic.state.layout import BlockKey

__all__ = ["Certifier"]


class Certifier:
    """Takes certificates. Every method but ``drop`` is collective and has the same result on every rank."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self._begun: Examination | None = None

    def certify(
        self, transition: Transition, moved: Iterable[BlockKey], saved: Mapping[BlockKey, str] = MappingProxyType({})
    ) -> None:
        """Have every rank compare the statements of all. Raises ``CertificateError``.

        ``saved``: hashes of the contents of a loaded checkpoint.
        """
        self.begin(transition, moved, saved)
        self.conclude()

    def begin(
        self, transition: Transition, moved: Iterable[BlockKey], saved: Mapping[BlockKey, str] = MappingProxyType({})
    ) -> None:
        """Begin :meth:`certify`, and return at once. :meth:`conclude` it before anything is committed."""
        at = self.context
        limit = ALL_BYTES if transition in ("start", "load") else LOOKED_AT_BYTES
        contents = looked_at(at.views.layouts, moved, at.record.version, limit)
        mine = statement(at.tools, at.view, at.record, at.parameters, contents)
        self._begun = begin_examination(at.tools, at.view, at.views.groups(at.view), mine, transition, saved)

    def conclude(self) -> None:
        """Wait for the certificate that was begun, if any. Raises ``CertificateError``."""
        if self._begun is None:
            return
        begun, self._begun = self._begun, None
        verdict = begun.complete()
        self.context.listener.examined(begun.view, verdict)
        if verdict.findings:
            raise CertificateError(verdict.findings)
        self.context.certificate = verdict.certificate

    def drop(self) -> None:
        """Forget the certificate that was begun: its generation is over, and the next has one of its own."""
        self._begun = None

    def dispute(self, mine: Disputes) -> NoReturn:
        """Raise ``CertificateError`` with every rank's copies whose history differs from their owner's: a bug."""
        at = self.context
        verdict = name_disputes(at.tools, at.view, at.record, mine)
        at.listener.examined(at.view, verdict)
        raise CertificateError(verdict.findings)

    def mend_memory(self, mine: Disputes) -> None:
        """Drop the wrong one of copies that have the same history but differ.

        Call it between the vote and the update, with no migration under way. Raises
        ``SilentCorruption`` if the right copy cannot be told from the wrong one.
        """
        at = self.context
        changes, verdict = examine_memory(at.tools, at.view, at.views.groups(at.view), at.record, mine)
        at.listener.examined(at.view, verdict)
        if not verdict.findings:  # the vote was taken again without the owner from which the others differed
            return
        if not changes:
            raise SilentCorruption(f"step {at.record.version}: " + "; ".join(verdict.findings))
        for change in changes:
            if change.kind == "drop" and change.rank == at.tools.fabric.rank:
                at.tools.pool.condemn(change.block)
        at.take_configuration(replace(at.view.configuration, placement=at.view.placement.apply(changes)))
        at.needs_rebalance = True
