"""Megatron's checkpoints: written in the background, in its own format, with a manifest that load verifies."""
