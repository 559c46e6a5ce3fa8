"""Everything by which one agent shows its job to users: console, pages, report, and figures for the workers' logs.

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

    def beat(self, workers: Collection[Worker], coordinates: bool) -> None:
        """Show the present state. ``workers``: of this node; ``coordinates``: the agent speaks for the job."""
        self._sources.meter.look(workers)
        figures = self._sources.figures()
        for worker in workers:
            worker.slot.tell(figures)
        self._pages.beat()
        if coordinates:
            self._report.beat()

    def end(self, code: int) -> None:
        """The job is over with exit status ``code``, and the agent speaks for it."""
        self._report.end(code)

    def close(self) -> None:
        """Show nothing any more."""
        self._console.close()
        self._pages.close()
