"""Who computes what: pure functions from integers to plans.

Nothing in this package imports torch, torch.distributed or Megatron. Every
process of a generation calls the same functions on the same integers and gets
the same bytes; ``planner.plan_hash`` is what they compare.

``model`` is the vocabulary, ``dataflow`` says which rows run on which cell,
``schedule`` turns that into tables, ``planner`` puts both together,
``validate`` checks any plan, whoever made it.
"""
