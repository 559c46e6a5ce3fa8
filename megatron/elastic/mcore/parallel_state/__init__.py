"""Megatron's ``parallel_state`` for stages and ranks other than those at launch."""
