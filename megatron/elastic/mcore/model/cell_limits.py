"""The cells that can compute Megatron's GPT, by their tensor-parallel groups and parts of the sequence.

While a rank is missing, its cell may have any cut for which :meth:`CellLimits.largest_part` knows a rank's part. While
none is, cells keep to the cuts that Megatron itself would launch (:meth:`CellLimits.refusal`).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from math import lcm
from typing import Any

from megatron.elastic.engine.compute.sequence_cut import SequenceCut
from megatron.elastic.mcore.args.combinations import takes_masks
from megatron.elastic.mcore.model.sequence_gather import SequencePart
from megatron.elastic.mcore.model.tensor_cut import Sizes, is_cut, refusal, share_of
from megatron.elastic.mcore.model.tensor_place import only_even
from megatron.elastic.plan.profile import PPM
from megatron.elastic.state.coverage import Position
from megatron.elastic.state.layout import ParamSpec

__all__ = ["CellLimits"]


@dataclass(frozen=True)
class CellLimits:
    """The cells that the configuration and arguments of Megatron allow; equal on every rank."""

    sizes: Sizes
    config: Any
    args: Any
    groups_of_any_size: bool
    """False where a rank has the tensor-parallel group of the launch alone."""
    shares_sequence: bool
    """False where no rank has a context-parallel group."""

    def largest_part(self, tensor: int, parts: int, parameters: Collection[ParamSpec]) -> int | None:
        """Return the largest part of a layer on one rank (:class:`ModelInterface`).

        Only the launch's cells compute with Transformer Engine (:class:`TensorPlace`).
        """
        sizes = self.sizes
        if not self._is_launch(tensor, parts) and (
            self._only_launch(tensor, parts) or tensor * parts > sizes.sequence or (parts > 1 and self._unshared())
        ):
            return None
        if tensor != sizes.tensor:
            unknown = any(spec.sharded and not is_cut(spec.name) for spec in parameters)
            if unknown or not self.groups_of_any_size or refusal(sizes, tensor):
                return None
        cut = SequenceCut(sizes.sequence, sizes.sequence_parallel, tensor)
        longest, whole = SequencePart(cut, Position(0, parts), None).longest, sizes.sequence
        if tensor == sizes.tensor:
            return -(-PPM * longest // (whole * tensor))
        share = share_of(sizes, Position(0, tensor))
        cuts = [(share.heads, sizes.heads), (share.columns, sizes.columns)]
        if sizes.shared_columns:
            cuts.append((share.shared, sizes.shared_columns))
        return max(-(-PPM * (stop - start) * longest // (of * whole)) for (start, stop), of in cuts)

    def refusal(self, tensor: int, parts: int, stages: int) -> str:
        """Return why no job has so many such cells while no rank is missing (:class:`ModelInterface`).

        A launch with ``--context-parallel-size`` or ``--pipeline-model-parallel-size`` is refused for the same reasons.
        """
        if stages > 1 and takes_masks(self.args):
            return "--reset-attention-mask: Megatron has masks in the first and the last stage alone: use --pp 1"
        reason = "" if self._is_launch(tensor, parts) else self._only_launch(tensor, parts)
        if reason or parts == 1:
            return reason
        length, size = self.sizes.sequence, f"CP {parts}"
        if length % (2 * parts):
            return f"{size} takes a --seq-length that is a multiple of {2 * parts}, and it is {length}"
        if self.sizes.sequence_parallel and length % (tensor * parts):
            return f"{size} and --sequence-parallel take a --seq-length that is a multiple of {tensor * parts}"
        return "" if parts == self.config.context_parallel_size else self._unshared()

    def _is_launch(self, tensor: int, parts: int) -> bool:
        return (tensor, parts) == (self.sizes.tensor, self.config.context_parallel_size)

    def _only_launch(self, tensor: int, parts: int) -> str:
        """Return why cells of such sizes, other than the launch's, cannot compute this model; empty if they may."""
        config, sizes = self.config, self.sizes
        if self.args.transformer_impl != "local":
            return "layers of Transformer Engine keep the tensor- and context-parallel sizes of the launch"
        if only_even(config) or not config.num_moe_experts:
            return only_even(config)
        if config.add_bias_linear:
            return "experts with biases have no uneven tensor-parallel cut: --disable-bias-linear"
        if config.moe_expert_capacity_factor is not None:
            return "--moe-expert-capacity-factor drops tokens by those of one rank, which other sizes change"
        if config.moe_router_load_balancing_type == "sinkhorn":
            return "--moe-router-load-balancing-type sinkhorn balances the tokens of one rank, which other sizes change"
        slices = tensor if parts == 1 else parts * lcm(2, tensor)
        if sizes.sequence % slices:  # losses of routers take equal numbers of tokens
            size = f"TP {tensor}, CP {parts}" if parts > 1 else f"TP {tensor}"
            return f"experts at {size} take a --seq-length that is a multiple of {slices}, and it is {sizes.sequence}"
        return ""

    def _unshared(self) -> str:
        """Return why ranks of this model cannot share the sequence in other parts than at the launch."""
        if not self.shares_sequence:
            return "no rank has a context-parallel group"
        if getattr(self.config, "window_size", None):
            return "--window-size: Megatron's own layers mask by the place in a tensor"
        if getattr(self.args, "position_embedding_type", "") == "mrope":
            return "--position-embedding-type mrope needs all of the sequence on one rank"
        return ""
