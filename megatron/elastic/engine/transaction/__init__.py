"""What changes: a step up to its commit, recovery from a loss, migration, boundaries, joins and fences.

Everything here changes one rank's context (:mod:`context`), on the training thread.
It imports :mod:`megatron.elastic.engine.generation` and :mod:`megatron.elastic.engine.compute`; neither imports it.
"""
