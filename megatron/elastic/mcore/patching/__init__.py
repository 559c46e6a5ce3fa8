"""The replacement of names of Megatron: the patch table, its contract with releases, and patches at start."""
