"""Connection, construction, warm-up and logging of one rank, between the Megatron adapter (``mcore``) and the engine.

This folder does not import Megatron, so another training loop could use it unchanged.
"""
