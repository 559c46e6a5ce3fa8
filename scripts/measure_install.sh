#!/usr/bin/env bash
# Cost of an installation: minutes, megabytes of the downloads, megabytes on disk. One JSON object as the last line.
#
#   bash scripts/measure_install.sh [--quickstart]     # from a clean clone (scripts/env.sh), native parts built
#   bash scripts/measure_install.sh --wheel FILE       # from a built wheel (scripts/build_packages.sh), empty environment
#
# With --quickstart also runs scripts/quickstart.sh twice in that clone and reports both times. With --wheel the
# installed package trains for two steps, so that a wheel that does not run is not measured.
set -euo pipefail
shopt -s inherit_errexit # a failing step fails the measurement
cd "$(dirname "${BASH_SOURCE[0]}")/.."
wheel=""
case "${1:-}" in
    "" | --quickstart) ;;
    --wheel)
        [[ -f "${2:-}" ]] || { echo "error: --wheel ${2:-}: no such file; build one with scripts/build_packages.sh" >&2 && exit 1; }
        wheel="$(realpath "$2")"
        ;;
    *) echo "usage: bash scripts/measure_install.sh [--quickstart | --wheel FILE]" >&2 && exit 1 ;;
esac
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
git clone --quiet . "$work/clone"
cd "$work/clone"
unset VIRTUAL_ENV PYTHONPATH MEGATRON_ELASTIC_VENV
source scripts/env.sh

seconds() { # seconds COMMAND...: run it, its output to stderr, print how long it took
    local start
    start=$(date +%s.%N)
    "$@" >&2
    awk -v a="$start" -v b="$(date +%s.%N)" 'BEGIN { printf "%.1f", b - a }'
}

megabytes() { awk -v bytes="$(du -sb "$1" | cut -f1)" 'BEGIN { printf "%.0f", bytes / 1e6 }'; }

index=()
[[ -z "${MEGATRON_ELASTIC_TORCH_INDEX:-}" ]] || index=(--index-url "$MEGATRON_ELASTIC_TORCH_INDEX")
megatron=(--no-deps --no-build-isolation --ignore-requires-python --no-binary megatron-core)

install_wheel() { # what a user types: torch first and alone, then the wheel, then megatron-core for this Python
    "$(elastic_find_python)" -m venv .venv
    VIRTUAL_ENV="$PWD/.venv"
    elastic_pip "${index[@]}" -r requirements/torch.txt
    elastic_pip "$wheel"
    elastic_pip -r requirements/build.txt
    elastic_pip "${megatron[@]}" -r requirements/megatron.txt
}

trains() { # the installed package, from an empty folder: no file of the clone is in reach
    mkdir "$work/empty" && cd "$work/empty"
    local command="$work/clone/.venv/bin/megatron-elastic"
    OMP_NUM_THREADS=1 "$command" launch --nproc-per-node 2 "$("$command" files)/pretrain_gpt.py" \
        --num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 32 --max-position-embeddings 32 \
        --micro-batch-size 2 --global-batch-size 8 --lr 1e-3 --train-iters 2 --mock-data --tokenizer-type NullTokenizer \
        --vocab-size 255 --eval-interval 1000 --eval-iters 0 --log-interval 1 --elastic
}

if [[ -n "$wheel" ]]; then
    install_seconds=$(seconds install_wheel)
    (trains >&2)
else
    install_seconds=$(seconds bash -c 'source scripts/env.sh && elastic_env')
fi
mkdir "$work/wheels"
# The same resolution once more, into a folder, without counting installed packages as present.
wanted=(-r requirements/build.txt -r requirements/torch.txt)
if [[ -n "$wheel" ]]; then wanted+=("$wheel"); else wanted+=(-r requirements/runtime.txt); fi
.venv/bin/python -m pip download --quiet --dest "$work/wheels" --constraint requirements/constraints.txt "${wanted[@]}" >&2
.venv/bin/python -m pip download --quiet --dest "$work/wheels" "${megatron[@]}" -r requirements/megatron.txt >&2

quickstart=""
if [[ "${1:-}" == --quickstart ]]; then
    quickstart=", \"quickstart_first_s\": $(seconds bash scripts/quickstart.sh)"
    quickstart+=", \"quickstart_again_s\": $(seconds bash scripts/quickstart.sh)"
fi
printf '{"python": "%s", "minutes": %s, "download_mb": %s, "disk_mb": %s, "cores": %s%s}\n' \
    "$(.venv/bin/python -c 'import platform; print(platform.python_version())')" \
    "$(awk -v s="$install_seconds" 'BEGIN { printf "%.1f", s / 60 }')" \
    "$(megabytes "$work/wheels")" "$(megabytes .venv)" "$(nproc)" "$quickstart"
