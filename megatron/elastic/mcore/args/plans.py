"""The plan for each feature that is refused with ``--elastic``: data for ``docs/support.md``."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["PLANS"]

_NONE = "none: "

# A table: one row a line, which the formatter would break up.
# fmt: off
PLANS: Mapping[str, str] = {
    "context parallelism that varies by batch":
        "cut each packed row by its own sequences, on Megatron's own layers first",
    "balancing experts over the global batch":
        "counts of all tokens in the step's record, as for balancing by a bias; the loss is then one step late",
    "experts chosen by chance": "draw them by sample, as dropout is",
    "experts from a dense checkpoint": "make the experts while the checkpoint is read",
    "linear and sparse attention variants": "take over their layers once they have been run on a GPU",
    "hybrid (state-space) models": "take over their layers once they have been run on a GPU",
    "positions of three axes": "cut them along the axis of samples, as the tokens",
    "legacy layers": _NONE + "Megatron has taken them out of its packages",
    "images that a model distils from itself (DINO)": _NONE + "its models are no GPTs",
    "torch FSDP2": _NONE + "state is sharded over all ranks already, with copies",
    "Megatron FSDP": _NONE + "state is sharded over all ranks already, with copies",
    "FP8 by a quantizer of one's own": "none, as long as what it keeps cannot be read and handed over",
    "FP4": "as FP8, after that has been run on a GPU",
    "types by module": "as FP8, after that has been run on a GPU",
    "layers of Kitchen": "as FP8, after that has been run on a GPU",
    "kernels that do not depend on the batch": "take them over once they have been run on a GPU",
    "random numbers of inference": _NONE + "a training needs numbers of its own on each rank",
    "CUDA graphs": "a graph a piece, captured anew after each change",
    "SOAP, and Muon with an adaptive step": "whole matrices as blocks and copies of state, as for Muon",
    "clipped or logged attention logits": "the largest logits in the vote, and factors of weights in the step's record",
    "checkpoints of FSDP and older formats": _NONE + "torch_dist is read at any sizes",
    "conversion of a checkpoint's format": _NONE + "torch_dist is read at any sizes",
    "gradients in files": "written by the owners of state, as checkpoints are",
    "node-local checkpoints": _NONE + "copies in memory replace them",
    "other data orders": _NONE + "a batch of no numbered samples cannot be read again",
    "filling in the middle": "draw the cut of a sample by its number",
    "ranks that exchange nothing": _NONE + "there is nothing that could be lost",
    "replicas that start unequal": _NONE + "ranks take each other's samples over, so replicas are equal",
    "another fault-tolerance layer": _NONE + "each would restart what the other keeps",
    "reinforcement learning": "samples of a step kept by number until its commit",
    "phases of the data": "the first sample of a phase as a part of the step's address",
}
"""Feature (:data:`~megatron.elastic.mcore.args.features.FEATURES`) → plan."""
# fmt: on
