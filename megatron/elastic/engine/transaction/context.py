"""Where one rank is: the record it is at, what it stands on, and the version of its parameters.

The parts of the engine (a step, a migration, a recovery) each change some of it, and
know nothing else of one another. What is derived from the standing, the phases of a
step among them, is derived anew when it is replaced, so that no part can go on with
what belonged to the standing before.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from megatron.elastic.comm.exchange import gather_messages
from megatron.elastic.engine.generation.configuration import Configuration, History
from megatron.elastic.engine.generation.factory import ViewFactory
from megatron.elastic.engine.generation.view import View
from megatron.elastic.engine.inject import Injector
from megatron.elastic.engine.transaction.agreement import Agreement
from megatron.elastic.engine.transaction.listener import Listener
from megatron.elastic.engine.transaction.phases import StepBody, Tools
from megatron.elastic.observe.phases import PhaseTimer
from megatron.elastic.state.certificate import Certificate
from megatron.elastic.state.record import StepRecord

__all__ = ["Context"]


@dataclass
class Context:
    """Belongs to the training thread."""

    tools: Tools
    views: ViewFactory
    agreement: Agreement
    record: StepRecord
    """Of the newest committed step."""
    view: View
    history: History
    """Placements that may be in force after a loss."""
    injector: Injector
    timer: PhaseTimer
    listener: Listener = field(default_factory=Listener)
    parameters: int = 0
    """Version of the parameters; older than the record's until the step's gather."""
    needs_rebalance: bool = False
    """Placement may be out of balance or short of mirrors."""
    settled_at: int = 0
    """Version from which this generation does work of its own."""
    admitted: int = 0
    """Generation that let this rank in, until it has voted."""
    acted_on: int = -1
    """Newest version whose agreed requests were acted on, or are void."""
    certificate: Certificate | None = None
    """The newest that passed."""
    report_keys: tuple[str, ...] = ()
    """Names the loss functions report, as far as the ranks have told each other."""
    _keys_of: int = -1
    """Generation in which they did."""
    _body: tuple[View, StepBody] | None = field(default=None, repr=False)

    @property
    def body(self) -> StepBody:
        """The phases of a step on the present standing."""
        if self._body is None or self._body[0] is not self.view:
            interval = self.views.config.verify_interval
            self._body = self.view, StepBody(self.tools, self.view, interval)
        return self._body[1]

    def take_configuration(self, configuration: Configuration) -> None:
        """The same generation on another basis."""
        self.history.enter(configuration)
        if configuration.assignment != self.view.assignment:
            self.parameters = -1  # of units that came here there are none yet
        self.view = self.views.with_configuration(self.view, configuration)

    def agree_on_keys(self, mine: Mapping[str, tuple[float, float]], anew: bool = False) -> tuple[str, ...]:
        """Names of what loss functions report, ascending. Collective once a generation, and where ``anew`` is asked."""
        if anew or self._keys_of != self.view.generation:
            told = gather_messages(self.tools.fabric, tuple[str, ...], tuple(mine))
            found = {key for keys in told.values() for key in keys}
            self.report_keys = tuple(sorted(found | set(self.report_keys)))
            self._keys_of = self.view.generation
        return self.report_keys
