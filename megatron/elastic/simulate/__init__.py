"""Simulator: the same plans and tables as real runs, costs instead of kernels.

``engine`` times one step of a plan; ``scenarios`` compares policies over fixed
damage; ``rates`` and ``traces`` turn published failure rates into event lists;
``goodput`` runs policies over traces. ``python -m megatron.elastic.simulate``
prints all of it.
"""
