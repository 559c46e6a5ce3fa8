"""How one process of the job ends, other than by the last iteration: exit codes and one line each (DESIGN §4).

What ends a job does so on every rank alike, wherever in Megatron's program it is noticed: in its
loop, in the evaluations after it, or while the last checkpoint is written.
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
from megatron.elastic.control.failures import FELL_BACK
from megatron.elastic.control.membership import Released
from megatron.elastic.engine.failures import NotFinite, SilentCorruption
from megatron.elastic.engine.recovery import StateLost
from megatron.elastic.mcore.checkpoints import BAD_INPUT, DETERMINISTIC, STATE_LOST, can_fall_back
from megatron.elastic.mcore.patches import Row
from megatron.elastic.mcore.prelude import Prelude
from megatron.elastic.plan.dataflow import PlanError
from megatron.elastic.state.certificate import CertificateError

__all__ = ["Endings"]


class Endings:
    """What the engine cannot go on from, turned into the end of this process or of the job."""

    def __init__(self, prelude: Prelude) -> None:
        self._prelude = prelude

    def named(self, row: Row) -> Row:
        """A row of the patch table whose replacement ends the job by name where the engine cannot go on."""
        return _inside(self._caught, row)

    def proven(self, row: Row) -> Row:
        """The same for what comes before the first step, where only a failed certificate is the engine's to name."""
        return _inside(self._certified, row)

    @contextmanager
    def _certified(self) -> Iterator[None]:
        try:
            yield
        except CertificateError as error:  # the same on every rank, and again if repeated
            self.leave(DETERMINISTIC, str(error))

    @contextmanager
    def _caught(self) -> Iterator[None]:
        try:
            yield
        except (StateLost, PlanError) as error:
            # Survivors alone can tell: who was let in with this loss would wait for them.
            self._give_up(STATE_LOST, str(error))
        except (CertificateError, SilentCorruption) as error:  # the same on every rank, and again if repeated
            self.leave(DETERMINISTIC, str(error))
        except ConfigError as error:
            # Found while computing, perhaps on some ranks only: it would come back on every rank that is started.
            self._give_up(BAD_INPUT, f"error: {error}")
        except NotFinite as error:
            if not can_fall_back(get_args()):
                raise
            self._fall_back(error)
        except Released:
            print(f"rank {self._prelude.links.fabric.rank} leaves as asked; the others go on", flush=True)
            self._end(0)

    def leave(self, code: int, why: str) -> NoReturn:
        """End this rank on purpose, with one line from whoever speaks."""
        self._prelude.notice(why)
        self._end(code)

    def _give_up(self, code: int, why: str) -> NoReturn:
        """End this rank and with it the job, whatever the others know; the launcher's last line says why."""
        if self._prelude.built:
            self._prelude.engine.close()
        self._prelude.links.membership.give_up(code, why)
        raise SystemExit(code)

    def _end(self, code: int) -> NoReturn:
        if self._prelude.built:
            self._prelude.engine.close()
        self._prelude.links.membership.finish(code)
        raise SystemExit(code)

    def _fall_back(self, error: NotFinite) -> NoReturn:
        """End this process so that, with all others, it is started again from the last checkpoint."""
        self._prelude.engine.close()
        self._prelude.notice(f"{error}, also when computed again: the job goes back to its last checkpoint (--load)")
        sys.stdout.flush()
        os._exit(FELL_BACK)


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
