"""The mutable state of one rank: its newest record, its view, and the version of its parameters.

The parts of the engine (step, migration, recovery) share this object and otherwise do not
know one another. Objects that depend on the view, such as the phases of a step, are made
anew when the view is replaced, so that no part works with an old view.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from megatron.elastic.comm.exchange import gather_messages
from megatron.elastic.engine.generation.configuration import Configuration, History
from megatron.elastic.engine.generation.factory import ViewFactory
from megatron.elastic.engine.generation.view import View
from megatron.elastic.engine.inject import Injector
from megatron.elastic.engine.settings import OverlapSettings
from megatron.elastic.engine.transaction.agreement import Agreement
from megatron.elastic.engine.transaction.background_gather import BackgroundGather
from megatron.elastic.engine.transaction.listener import Listener
from megatron.elastic.engine.transaction.phases import StepBody
from megatron.elastic.engine.transaction.tools import Tools
from megatron.elastic.observe.phases import PhaseTimer
from megatron.elastic.state.certificate import Certificate
from megatron.elastic.state.record import StepRecord

__all__ = ["Context"]


@dataclass
class Context:
    """One rank's context. Only the training thread uses it."""

    tools: Tools
    views: ViewFactory
    agreement: Agreement
    record: StepRecord
    """Record of the newest committed step."""
    view: View
    history: History
    """Configurations that may be in force after a loss."""
    injector: Injector
    timer: PhaseTimer
    listener: Listener = field(default_factory=Listener)
    parameters: int = 0
    """Version of the parameters; lower than the record's until the step's gather."""
    gathering: BackgroundGather | None = None
    """The gather of the record's parameters, while it goes on behind the next forward."""
    needs_rebalance: bool = False
    """True if blocks may be out of balance or short of mirrors."""
    settled_at: int = 0
    """Version at which the present generation began its own steps."""
    admitted: int = 0
    """Generation that admitted this rank; 0 once this rank has voted."""
    acted_on: int = -1
    """Newest version whose agreed requests were carried out or are void."""
    certificate: Certificate | None = None
    """The newest certificate that passed."""
    report_keys: tuple[str, ...] = ()
    """Names of the values that the loss functions report, as exchanged between the ranks."""
    _keys_of: int = -1
    """Generation in which the names were exchanged."""
    _body: tuple[View, StepBody] | None = field(default=None, repr=False)

    @property
    def body(self) -> StepBody:
        """The phases of a step under the present view."""
        if self._body is None or self._body[0] is not self.view:
            config = self.views.config
            self._body = self.view, StepBody(self.tools, self.view, OverlapSettings.of(config), config.verify_interval)
        return self._body[1]

    def settle_parameters(self) -> None:
        """Wait until the parameters are of the record's version, if their gather is under way. Raises ``CommError``."""
        if self.gathering is not None:
            self.gathering.complete()
            self.parameters, self.gathering = self.gathering.version, None

    def abandon_gather(self) -> None:
        """Forget a gather that a change of generation ends: parameters have no values until the next one."""
        if self.gathering is not None and self.gathering.may_spoil():
            self.parameters, self.tools.arena.filled = -1, False
        self.gathering = None

    def take_configuration(self, configuration: Configuration) -> None:
        """Change this generation's configuration."""
        self.history.enter(configuration)
        if configuration.assignment != self.view.assignment:
            self.parameters = -1  # units that were moved here have no parameters yet
        self.view = self.views.with_configuration(self.view, configuration)

    def know_keys(self) -> None:
        """Take the names of the reported values as exchanged: all ranks have voted, or have them from one that has."""
        self._keys_of = self.view.generation

    def agree_on_keys(self, mine: Mapping[str, tuple[float, float]], anew: bool = False) -> tuple[str, ...]:
        """Return the names of the reported values, ascending. Collective once a generation, and if ``anew``."""
        if anew or self._keys_of != self.view.generation:
            by_rank = gather_messages(self.tools.fabric, tuple[str, ...], tuple(mine))
            found = {key for keys in by_rank.values() for key in keys}
            self.report_keys = tuple(sorted(found | set(self.report_keys)))
            self._keys_of = self.view.generation
        return self.report_keys
