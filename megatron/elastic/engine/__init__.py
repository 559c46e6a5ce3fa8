"""The engine, which runs each step as a transaction: executor, optimizer, dropout, data source, recovery.

The engine has no argument parser and no training loop, and does not call ``get_args()``. A host
(``mcore``) gives it a model as a :class:`~megatron.elastic.engine.compute.model_interface.ModelInterface`
and calls ``step``, ``evaluate`` and ``fenced``.
"""
