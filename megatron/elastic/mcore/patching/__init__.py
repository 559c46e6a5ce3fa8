"""How names of Megatron are replaced: the patch table, its contract with releases, and what is patched at start."""
