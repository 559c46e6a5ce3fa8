"""torchrun-compatible launcher: one agent a node, workers forked from a preloaded parent (DESIGN §4)."""
