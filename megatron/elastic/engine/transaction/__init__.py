"""The changes of one rank: a step up to its commit, recovery, migration, boundaries, joins and fences.

Everything here changes one rank's context (:mod:`context`), on the training thread.
It imports :mod:`megatron.elastic.engine.generation` and :mod:`megatron.elastic.engine.compute`; neither imports it.
"""
