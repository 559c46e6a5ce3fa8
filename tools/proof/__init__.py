"""A proof of the engine on the devices of a machine: layouts, parity, kills, recovery, overhead, rejoin, memory.

``scripts/gpu_proof.sh`` and ``scripts/npu_proof.sh`` run it; ``docs/standin.md`` says what its report has. It uses
the stored programs alone: no network, no test code.
"""
