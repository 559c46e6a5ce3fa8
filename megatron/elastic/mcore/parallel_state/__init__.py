"""Megatron's ``parallel_state`` for a stage or a rank other than the one at launch."""
