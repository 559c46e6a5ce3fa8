"""Megatron's model and optimizer: units, split backward, sample-keyed dropout, parameter groups."""
