"""Schedule tables as data: generators, list scheduling, timing and validation."""
