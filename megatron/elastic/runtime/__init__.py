"""What connects, builds, warms up and reports one rank; between the Megatron adapter (``mcore``) and the engine.

Nothing here imports Megatron: another training loop could use it as it is.
"""
