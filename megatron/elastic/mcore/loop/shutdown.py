"""The end of a process before the last iteration: exit codes with one line each (docs/design.md §4).

An error that ends the job has the same effect on every rank and at every place of Megatron's
program: in its loop, in the evaluations after it, or while the last checkpoint is written.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NoReturn

from megatron.training import get_args

from megatron.elastic.config import ConfigError
from megatron.elastic.control.exits import ExitCode
from megatron.elastic.control.membership import Released
from megatron.elastic.engine.failures import CommunicationFault, NotFinite, SilentCorruption
from megatron.elastic.engine.transaction.agreement import StateLost
from megatron.elastic.mcore.checkpoint.save_points import step_to_go_back_to
from megatron.elastic.mcore.loop.setup import Setup
from megatron.elastic.mcore.loop.way_back import NothingSaved, WayBack
from megatron.elastic.mcore.patching.patches import Row
from megatron.elastic.observe.event_kinds import EndEvent
from megatron.elastic.plan.dataflow import PlanError
from megatron.elastic.runtime.start import JobGone
from megatron.elastic.state.certificate import CertificateError

__all__ = ["Shutdown"]


class Shutdown:
    """Turns errors that the engine cannot recover from into the end of this process or of the job.

    ``respawn``: ended processes are started again, so all ranks together can go back to a checkpoint.
    """

    def __init__(self, setup: Setup, respawn: bool) -> None:
        self._setup = setup
        self._respawn = respawn

    def named(self, row: Row) -> Row:
        """Return a row of the patch table whose replacement ends the job when the engine raises a fatal error."""
        return _inside(self._caught, row)

    def proven(self, row: Row) -> Row:
        """Return a row for functions before the first step, where a job ends that cannot begin with its state."""
        return _inside(self._begun, row)

    @contextmanager
    def _begun(self) -> Iterator[None]:
        try:
            yield
        except NothingSaved as error:
            self._give_up(ExitCode.STATE_LOST, str(error))
        except CertificateError as error:  # the same on every rank, and again if repeated
            self.leave(ExitCode.DETERMINISTIC, str(error))

    @contextmanager
    def _caught(self) -> Iterator[None]:
        try:
            yield
        except StateLost as error:
            self._go_back(str(error), error.version, ExitCode.BEGUN_ANEW)
            # Only survivors can raise this; ranks admitted after this loss would wait for them.
            self._give_up(ExitCode.STATE_LOST, f"{error}; resume from the last checkpoint (--load)")
        except PlanError as error:
            self._give_up(ExitCode.STATE_LOST, str(error))
        except JobGone as gone:
            if gone.begins_anew or self._step_to_go_back_to() is not None:
                self._begin_anew(ExitCode.BEGUN_ANEW, str(gone))
            self._end(ExitCode.STATE_LOST, str(gone))  # the ranks that held the state have ended and logged the reason
        except (CertificateError, SilentCorruption) as error:  # the same on every rank, and again if repeated
            self.leave(ExitCode.DETERMINISTIC, str(error))
        except CommunicationFault as error:
            self._give_up(ExitCode.DETERMINISTIC, str(error))
        except ConfigError as error:
            # Found while computing, perhaps on some ranks only: a restarted rank would find it again.
            self._give_up(ExitCode.FAILED, f"error: {error}")
        except NotFinite as error:
            why = f"{error}, also when computed again"
            self._go_back(why, self._setup.engine.record.version, ExitCode.FELL_BACK)
            raise
        except Released:
            print(f"rank {self._setup.links.fabric.rank} leaves as requested; the other ranks go on", flush=True)
            self._end(0, "leaves as requested")

    def leave(self, code: int, why: str) -> NoReturn:
        """End this rank on purpose; the rank that logs prints ``why``."""
        self._setup.notice(why)
        self._end(code, why)

    def _give_up(self, code: int, why: str) -> NoReturn:
        """End this rank and with it the job, independent of other ranks; the launcher's last line gives the reason."""
        self._close(code, why)
        self._setup.links.membership.give_up(code, why)
        raise SystemExit(code)

    def finish(self) -> None:
        """Tell the agent that this rank has come to the end of the training."""
        self._close(0, "")
        self._setup.links.membership.finish(0)

    def _end(self, code: int, why: str) -> NoReturn:
        self._close(code, why)
        self._setup.links.membership.finish(code)
        raise SystemExit(code)

    def _close(self, code: int, why: str) -> None:
        """Close the engine, and log the end of this rank."""
        step = -1
        if self._setup.built:
            self._setup.engine.close()
            step = self._setup.engine.record.version
        self._setup.links.events.write(EndEvent(step, int(code), why))

    def _step_to_go_back_to(self) -> int | None:
        return step_to_go_back_to(get_args()) if self._respawn else None

    def _go_back(self, why: str, version: int, code: int) -> None:
        """End with all ranks to start again from the last checkpoint; returns if there is none.

        ``version``: the newest committed step.
        """
        step = self._step_to_go_back_to()
        if step is None:
            return
        back = WayBack(why, step, version)
        self._setup.notice(back.line)
        self._setup.links.events.write(back.event)
        self._begin_anew(code, why)

    def _begin_anew(self, code: int, why: str) -> NoReturn:
        """End this process, like all others, so that the agents start them again."""
        self._close(code, why)
        sys.stdout.flush()
        os._exit(code)


def _inside(context: Callable[[], AbstractContextManager[None]], row: Row) -> Row:
    symbol, reason, make = row

    def made(original: Callable[..., Any]) -> Callable[..., Any]:
        inner = make(original)

        @functools.wraps(inner)
        def replacement(*args: Any, **kwargs: Any) -> Any:
            with context():
                return inner(*args, **kwargs)

        return replacement

    return symbol, reason, made
