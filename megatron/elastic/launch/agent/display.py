"""Everything by which one agent shows its job to users: console, pages, report, messages, and figures for logs.

It reads what the agent knows (:class:`~megatron.elastic.launch.agent.admin.Sources`) and waits for nothing: no worker,
no store, no client.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from megatron.elastic.control.events import Event
from megatron.elastic.launch.agent.admin import Admin, Sources
from megatron.elastic.launch.agent.console import Console
from megatron.elastic.launch.agent.loop import Loop
from megatron.elastic.launch.agent.pages import Pages
from megatron.elastic.launch.agent.run_report import RunReport
from megatron.elastic.launch.agent.webhook import Webhook, end_message, loss_message
from megatron.elastic.launch.arguments import JobSpec
from megatron.elastic.launch.workers.pool import Worker

__all__ = ["Display"]


class Display:
    """Of one agent. ``append``: puts an event, such as a command of a user, into the journal."""

    def __init__(self, job: JobSpec, loop: Loop, node: int, sources: Sources, append: Callable[[Event], None]) -> None:
        self._sources = sources
        self._report = RunReport(sources)
        self._pages = Pages(job.settings, job.web_token, sources)
        self._console = Console(loop, job.run_id, node, Admin(sources, append).handle)
        self._webhook = Webhook(job.webhook) if job.webhook else None
        self._losses = 0
        """Losses that messages have told of, here or from another agent."""
        self._ended = False

    def beat(self, workers: Collection[Worker], coordinates: bool) -> None:
        """Show the present state. ``workers``: of this node; ``coordinates``: the agent speaks for the job."""
        self._sources.meter.look(workers)
        figures = self._sources.figures()
        for worker in workers:
            worker.slot.tell(figures)
        self._pages.beat()
        if coordinates:
            self._report.beat()

    def follow(self, coordinates: bool) -> None:
        """After each entry of the journal: tell of new losses."""
        past = self._sources.history
        new, self._losses = past.losses - self._losses, past.losses
        if new and coordinates and self._webhook is not None:
            self._webhook.send(loss_message(self._sources.status(), tuple(past.last_losses[-new:])))

    def end(self, code: int, why: str = "") -> None:
        """The job is over with exit status ``code``, and the agent speaks for it."""
        self._report.end(code)
        if self._webhook is not None and not self._ended:
            self._webhook.send(end_message(self._sources.status(), code, why))
        self._ended = True

    def close(self) -> None:
        """Show nothing any more."""
        self._console.close()
        self._pages.close()

    def wait(self) -> None:
        """Wait a bounded time until the last messages are sent."""
        if self._webhook is not None:
            self._webhook.close()
