"""torchrun-compatible launcher: one agent a node, workers forked from a preloaded parent (docs/design.md §4)."""
