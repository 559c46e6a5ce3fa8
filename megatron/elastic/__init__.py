"""An elastic-native Megatron: hybrid-parallel pretraining that loses and gains ranks inside the step.

``adaptor`` is the one import a Megatron-LM script needs; ``launch`` starts jobs.
Imports flow one way: adaptor, mcore, engine, then state, plan, comm and control,
then platform and config.
"""
