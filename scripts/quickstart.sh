#!/usr/bin/env bash
# Trains a small GPT on real text on this machine, kills a worker part way, and shows that it did not matter.
#
#   bash scripts/quickstart.sh                        # needs Python >= 3.11, g++ and pip; no GPU
#   bash scripts/quickstart.sh --input corpus.jsonl   # on text of your own
#   bash scripts/quickstart.sh --help                 # more flags (tools/quickstart.py)
#
# The last line of the output is one JSON object.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/env.sh
elastic_env
exec python -W ignore -m tools.quickstart "$@"
