"""The step as a transaction: executor, optimizer, dropout, data source, recovery.

The engine knows no argparse, no ``get_args()`` and no training loop. A host
(``mcore``) hands it a model behind :class:`~megatron.elastic.engine.compute.model_interface.ModelInterface`
and calls ``step``, ``evaluate`` and ``fenced``.
"""
