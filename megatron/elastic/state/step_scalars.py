"""The scalars of the update that a record describes, by kind of run.

Many runs of a rank share a parameter group and multipliers, so they are worked out once for all of them.
"""

from __future__ import annotations

from megatron.elastic.state.adam import AdamScalars, LionScalars, SgdScalars
from megatron.elastic.state.layout import Run
from megatron.elastic.state.lion import Lion
from megatron.elastic.state.muon import Muon
from megatron.elastic.state.muon_step import MuonScalars
from megatron.elastic.state.record import Hyper, StepRecord

__all__ = ["Scalars", "StepScalars"]

Scalars = AdamScalars | LionScalars | SgdScalars | MuonScalars


class StepScalars:
    """See the module docstring."""

    def __init__(self, record: StepRecord, hyper: Hyper) -> None:
        self.record = record
        self._hyper = hyper
        self._known: dict[tuple[int, float, float, bool], Scalars] = {}

    def of(self, run: Run) -> Scalars:
        """Return the scalars of ``run``."""
        kind = run.group, run.lr_mult, run.wd_mult, run.matrix is not None
        scalars = self._known.get(kind)
        if scalars is None:
            scalars = self._known[kind] = self._worked_out(run)
        return scalars

    def _worked_out(self, run: Run) -> Scalars:
        record, hyper = self.record, self._hyper
        rate, multiplier = record.rates[run.group], record.grad_multiplier
        lr, decay = rate.lr * run.lr_mult, rate.weight_decay * run.wd_mult
        if run.matrix is not None and isinstance(hyper.matrices, Lion):
            return LionScalars(multiplier, lr, decay, hyper.matrices)
        if run.matrix is not None:
            assert isinstance(hyper.matrices, Muon), "layouts know matrices where something steps them"
            return MuonScalars(multiplier, lr, decay, hyper.matrices)
        if hyper.optimizer == "sgd":
            return SgdScalars(multiplier, lr, hyper.sgd_momentum, decay)
        return AdamScalars(
            multiplier,
            lr,
            hyper.beta1,
            hyper.beta2,
            hyper.eps_by_group[run.group] if hyper.eps_by_group else hyper.eps,
            decay,
            record.bias_correction1,
            record.bias_correction2,
            hyper.decoupled_weight_decay,
            hyper.moments,
        )
