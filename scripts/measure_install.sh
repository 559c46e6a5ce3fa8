#!/usr/bin/env bash
# Cost of the installation: size of the downloads, time to a built environment in a clean clone, its size on disk.
#
#   bash scripts/measure_install.sh [--quickstart]     # one JSON object as the last line
#
# With --quickstart also runs scripts/quickstart.sh twice in that clone and reports both times.
set -euo pipefail
shopt -s inherit_errexit # a failing step fails the measurement
cd "$(dirname "${BASH_SOURCE[0]}")/.."
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
git clone --quiet . "$work/clone"
cd "$work/clone"
unset VIRTUAL_ENV PYTHONPATH MEGATRON_ELASTIC_VENV

seconds() { # seconds COMMAND...: run it, its output to stderr, print how long it took
    local start
    start=$(date +%s.%N)
    "$@" >&2
    awk -v a="$start" -v b="$(date +%s.%N)" 'BEGIN { printf "%.1f", b - a }'
}

install_seconds=$(seconds bash -c 'source scripts/env.sh && elastic_env')
mkdir "$work/wheels"
# The same resolution once more, into a folder, without counting installed packages as present.
.venv/bin/python -m pip download --quiet --dest "$work/wheels" --constraint requirements/constraints.txt \
    -r requirements/build.txt -r requirements/torch.txt -r requirements/runtime.txt >&2
.venv/bin/python -m pip download --quiet --dest "$work/wheels" --no-deps --no-build-isolation --ignore-requires-python \
    --no-binary megatron-core -r requirements/megatron.txt >&2
download_bytes=$(du -sb "$work/wheels" | cut -f1)
disk_bytes=$(du -sb .venv | cut -f1)

quickstart=""
if [[ "${1:-}" == --quickstart ]]; then
    quickstart=", \"quickstart_first_s\": $(seconds bash scripts/quickstart.sh)"
    quickstart+=", \"quickstart_again_s\": $(seconds bash scripts/quickstart.sh)"
fi
printf '{"download_bytes": %s, "environment_bytes": %s, "install_s": %s, "cores": %s%s}\n' \
    "$download_bytes" "$disk_bytes" "$install_seconds" "$(nproc)" "$quickstart"
