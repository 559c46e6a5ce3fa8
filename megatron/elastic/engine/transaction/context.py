"""Where one rank is: the record it is at, what it stands on, and the version of its parameters.

The parts of the engine (a step, a movement, a recovery) each change some of it, and
know nothing else of one another. What is derived from the standing, the phases of a
step among them, is derived anew when it is replaced, so that no part can go on with
what belonged to the standing before.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from megatron.elastic.comm.exchange import gather_messages
from megatron.elastic.engine.generation.configuration import Basis, History
from megatron.elastic.engine.generation.view import Standing
from megatron.elastic.engine.inject import Injector
from megatron.elastic.engine.transaction.agreement import Recovery
from megatron.elastic.engine.transaction.listener import Listener
from megatron.elastic.engine.transaction.phases import StepBody, Tools
from megatron.elastic.observe.phases import PhaseTimer
from megatron.elastic.state.certificate import Certificate
from megatron.elastic.state.record import StepRecord

__all__ = ["Position"]


@dataclass
class Position:
    """Belongs to the training thread."""

    tools: Tools
    recovery: Recovery
    record: StepRecord
    """Of the newest committed step."""
    standing: Standing
    history: History
    """Placements that may be in force after a loss."""
    injector: Injector
    timer: PhaseTimer
    listener: Listener = field(default_factory=Listener)
    parameters: int = 0
    """Version of the parameters; older than the record's until the step's gather."""
    unsettled: bool = False
    """Placement may be out of balance or short of mirrors."""
    settled_at: int = 0
    """Version from which this generation does work of its own."""
    admitted: int = 0
    """Generation that let this rank in, until it has voted."""
    heeded: int = -1
    """Newest version whose agreed requests were acted on, or are void."""
    certificate: Certificate | None = None
    """The newest that passed."""
    report_keys: tuple[str, ...] = ()
    """Names the loss functions report, as far as the ranks have told each other."""
    _keys_of: int = -1
    """Generation in which they did."""
    _body: tuple[Standing, StepBody] | None = field(default=None, repr=False)

    @property
    def body(self) -> StepBody:
        """The phases of a step on the present standing."""
        if self._body is None or self._body[0] is not self.standing:
            interval = self.recovery.config.verify_interval
            self._body = self.standing, StepBody(self.tools, self.standing, interval)
        return self._body[1]

    def stand_on(self, basis: Basis) -> None:
        """The same generation on another basis."""
        self.history.enter(basis)
        if basis.assignment != self.standing.assignment:
            self.parameters = -1  # of units that came here there are none yet
        self.standing = self.recovery.restand(self.standing, basis)

    def agree_on_keys(self, mine: Mapping[str, tuple[float, float]], anew: bool = False) -> tuple[str, ...]:
        """Names of what loss functions report, ascending. Collective once a generation, and where ``anew`` is asked."""
        if anew or self._keys_of != self.standing.generation:
            told = gather_messages(self.tools.fabric, tuple[str, ...], tuple(mine))
            found = {key for keys in told.values() for key in keys}
            self.report_keys = tuple(sorted(found | set(self.report_keys)))
            self._keys_of = self.standing.generation
        return self.report_keys
