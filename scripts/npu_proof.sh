#!/usr/bin/env bash
# Shows on this machine's Ascend NPUs what the engine does there: layouts, parity with plain Megatron, a kill at each
# named point, recovery by phases, step time and memory beside plain Megatron, rejoin of 1 GiB of state, exact mode,
# the vendor's library. One device suffices; ranks share it. No network once the environment is made.
#
#   bash scripts/npu_proof.sh                # reports in out/npu_proof: report.md, report.json
#   bash scripts/npu_proof.sh --short        # one case of each kind
#   bash scripts/npu_proof.sh --help         # more flags (tools/proof), among them another platform
#
# The last line of the output is one JSON object; exit status 1 if a section failed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/env.sh
elastic_env
exec python -W ignore -m tools.proof --platform npu --out "out/npu_proof" "$@"
