"""Assignment of work to cells: pure functions from integers to plans.

Nothing in this package imports torch, torch.distributed or Megatron. Every
process of a generation calls the same functions on the same integers and gets
the same bytes; they compare ``Plan.digest``.

Vocabulary: ``model`` (data), ``topology`` (places of ranks), ``cost`` (ns and
bytes of pieces). Dataflow: ``dataflow`` (rows to cells), ``planner`` (nominal
and instant plans). Tables: ``schedule`` (fixed orders), ``listing`` (anything
else), ``orders`` (which of them), ``timing`` (how long), ``validate`` (whether
at all). Graph: ``partition`` (one pipeline), ``graph`` (whole topologies),
``steady`` (moves, pay-back, decisions). Frequency: ``frequency``, ``clocks``.
``profile`` measures, ``policy`` compares with other systems.
"""
