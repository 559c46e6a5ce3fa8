#!/usr/bin/env bash
# Cost of an installation: minutes, processor minutes, megabytes of the downloads and on disk. One JSON object as the last line.
#
#   bash scripts/measure_install.sh [--quickstart]     # from a clean clone (scripts/env.sh), native parts built
#   bash scripts/measure_install.sh --wheel FILE       # from a built wheel (scripts/build_packages.sh), empty environment
#
# With --quickstart also runs scripts/quickstart.sh twice in that clone and reports both times. With --wheel the
# installed package trains for two steps, and programs of torch alone (DDP and FSDP2) run on its backend under
# torchrun, so that a wheel that does not run is not measured.
# tools/installations.py records what it prints.
set -euo pipefail
shopt -s inherit_errexit # a failing step fails the measurement
cd "$(dirname "${BASH_SOURCE[0]}")/.."
wheel="" trained=""
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

seconds() { # seconds COMMAND...: run it, its output to stderr; print how long it took, keep its processor time
    local TIMEFORMAT='%R %U %S'
    { time "$@" >&3 2>&3; } 3>&2 2>"$work/spent"
    awk '{ printf "%.1f", $1 }' "$work/spent"
}

processor_minutes() { awk '{ printf "%.1f", ($2 + $3) / 60 }' "$work/spent"; } # of the last call of `seconds`

megabytes() { awk -v bytes="$(du -sb "$1" | cut -f1)" 'BEGIN { printf "%.0f", bytes / 1e6 }'; }

index=()
[[ -z "${MEGATRON_ELASTIC_TORCH_INDEX:-}" ]] || index=(--index-url "$MEGATRON_ELASTIC_TORCH_INDEX")
megatron=(--no-deps --no-build-isolation --ignore-requires-python --no-binary megatron-core)

brings_megatron() { # the wheel requires megatron-core where that declares the interpreter: from Python 3.12 on
    [[ -n "$wheel" ]] && .venv/bin/python -c 'import sys; sys.exit(sys.version_info < (3, 12))'
}

install_wheel() { # what a user types: torch first and alone, then the wheel, on Python 3.11 also megatron-core
    "$(elastic_find_python)" -m venv .venv
    VIRTUAL_ENV="$PWD/.venv"
    elastic_pip "${index[@]}" -r requirements/torch.txt
    elastic_pip "$wheel"
    brings_megatron && return
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

runs_programs() { # DDP and FSDP2 without an import of ours, in the same folder: on backend elastic they get gloo's result
    local bin="$work/clone/.venv/bin" examples program backend
    cd "$work/empty"
    examples="$("$bin/megatron-elastic" files)/examples"
    for program in ddp fsdp2; do
        ! grep -n 'import .*megatron\|from megatron' "$examples/$program.py" >&2 || return 1
        for backend in elastic gloo; do
            OMP_NUM_THREADS=1 "$bin/torchrun" --standalone --nproc-per-node 2 "$examples/$program.py" "$backend" |
                sort >"$work/$program.$backend"
            cat "$work/$program.$backend" >&2
        done
        (("$(grep -c '^rank [01] of 2 on elastic: ' "$work/$program.elastic")" == 2)) || return 1
        diff <(sed 's/ on elastic:/ on gloo:/' "$work/$program.elastic") "$work/$program.gloo" >&2 || return 1
    done
}

if [[ -n "$wheel" ]]; then
    install_seconds=$(seconds install_wheel)
    (trains) | tee "$work/training" >&2
    steps=$(grep -c 'iteration .* lm loss: [0-9]' "$work/training" || true)
    (("$steps" == 2)) || { echo "error: the installed package trained $steps steps of 2" >&2 && exit 1; }
    (runs_programs) || { echo "error: a program of torch alone does not run on the installed backend elastic" >&2 && exit 1; }
    trained=", \"trained_steps\": $steps, \"programs\": [\"ddp\", \"fsdp2\"]"
else
    install_seconds=$(seconds bash -c 'source scripts/env.sh && elastic_env')
fi
processor_minutes=$(processor_minutes)
mkdir "$work/wheels"
# The same resolution once more, into a folder, without counting installed packages as present.
wanted=(-r requirements/torch.txt)
if [[ -n "$wheel" ]]; then wanted+=("$wheel"); else wanted+=(-r requirements/runtime.txt); fi
brings_megatron || wanted+=(-r requirements/build.txt)
.venv/bin/python -m pip download --quiet --dest "$work/wheels" --constraint requirements/constraints.txt "${wanted[@]}" >&2
brings_megatron ||
    .venv/bin/python -m pip download --quiet --dest "$work/wheels" "${megatron[@]}" -r requirements/megatron.txt >&2

quickstart=""
if [[ "${1:-}" == --quickstart ]]; then
    quickstart=", \"quickstart_first_s\": $(seconds bash scripts/quickstart.sh)"
    quickstart+=", \"quickstart_again_s\": $(seconds bash scripts/quickstart.sh)"
fi
printf '{"python": "%s", "torch": "%s", "megatron": "%s", ' \
    "$(.venv/bin/python -c 'import platform; print(platform.python_version())')" \
    "$(.venv/bin/python -c 'import torch; print(torch.__version__)')" \
    "$(.venv/bin/python -c 'import importlib.metadata as m; print(m.version("megatron-core"))')"
printf '"minutes": %s, "processor_minutes": %s, "download_mb": %s, "disk_mb": %s, "cores": %s%s}\n' \
    "$(awk -v s="$install_seconds" 'BEGIN { printf "%.1f", s / 60 }')" "$processor_minutes" \
    "$(megabytes "$work/wheels")" "$(megabytes .venv)" "$(env -u OMP_NUM_THREADS nproc)" "$trained$quickstart"
