"""Megatron's arguments: our flags, the support matrix, substitutions, and checks that name the flag and the fix."""
