"""State: blocks, copies, step records, transfers, certificates.

The layout half (``layout``, ``ownership``, ``record``, ``protocol``) is pure:
no torch, no torch.distributed, no Megatron. The pool half (``adam``, ``pool``,
``transfer``, ``certificate``, ``checkpoint_view``) handles tensors, those of a
device through their ``place`` alone.
"""
