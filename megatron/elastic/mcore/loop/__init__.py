"""Megatron-LM's training loop as the host of the engine: set-up, loop, data, logs and shutdown."""
