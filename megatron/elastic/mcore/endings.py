"""How one process of the job ends, other than by the last iteration: exit codes and one line each (DESIGN §4)."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

from megatron.training import get_args

from megatron.elastic.config import ConfigError
from megatron.elastic.control.failures import FELL_BACK
from megatron.elastic.control.membership import Released
from megatron.elastic.engine.failures import NotFinite, SilentCorruption
from megatron.elastic.engine.recovery import StateLost
from megatron.elastic.mcore.checkpoints import BAD_INPUT, DETERMINISTIC, STATE_LOST, can_fall_back
from megatron.elastic.mcore.prelude import Prelude
from megatron.elastic.plan.dataflow import PlanError
from megatron.elastic.state.certificate import CertificateError

__all__ = ["Endings"]


class Endings:
    """What the engine cannot go on from, turned into the end of this process or of the job."""

    def __init__(self, prelude: Prelude) -> None:
        self._prelude = prelude

    @contextmanager
    def named(self) -> Iterator[None]:
        """Run Megatron's loop inside."""
        try:
            yield
        except (StateLost, PlanError) as error:
            self.leave(STATE_LOST, str(error))
        except (CertificateError, SilentCorruption) as error:  # the same on every rank, and again if repeated
            self.leave(DETERMINISTIC, str(error))
        except ConfigError as error:
            # Found while computing, perhaps on some ranks only: it would come back on every rank that is started.
            self._prelude.links.membership.give_up(BAD_INPUT, f"error: {error}")
            raise SystemExit(BAD_INPUT) from None
        except NotFinite as error:
            if not can_fall_back(get_args()):
                raise
            self._fall_back(error)
        except Released:
            print(f"rank {self._prelude.links.fabric.rank} leaves as asked; the others go on", flush=True)
            self._prelude.engine.close()
            self._prelude.links.membership.finish(0)
            raise SystemExit(0) from None

    def leave(self, code: int, why: str) -> NoReturn:
        """End this rank on purpose, with one line from whoever speaks."""
        engine, links = self._prelude.engine, self._prelude.links
        engine.close()
        living = engine.recovery.members or engine.standing.living
        if living[0] == links.fabric.rank:
            print(why, flush=True)
        links.membership.finish(code)
        raise SystemExit(code)

    def _fall_back(self, error: NotFinite) -> NoReturn:
        """End this process so that, with all others, it is started again from the last checkpoint."""
        self._prelude.engine.close()
        self._prelude.notice(f"{error}, also when computed again: the job goes back to its last checkpoint (--load)")
        sys.stdout.flush()
        os._exit(FELL_BACK)
