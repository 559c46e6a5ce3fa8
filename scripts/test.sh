#!/usr/bin/env bash
# Sets itself up (scripts/env.sh) and runs the checks.
#
#   bash scripts/test.sh            lint, types, unit, integration and short chaos tests: about 25 minutes on 2 cores
#   bash scripts/test.sh --all      everything, slow tests included
#   bash scripts/test.sh -- ARGS    set up, then pytest ARGS (for one test while working on it)
#
# MEGATRON_ELASTIC_TEST_SECONDS bounds the run of pytest (default 3000, with --all 14400).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/env.sh
export PIP_COMPILE=0 # a module is compiled when it is first imported, and most are never
elastic_env dev

export OMP_NUM_THREADS=1 PYTHONUNBUFFERED=1 MPLBACKEND=Agg
limit="${MEGATRON_ELASTIC_TEST_SECONDS:-3000}"
selection=(-m "not slow")
case "${1:-}" in
    "") ;;
    --all)
        selection=(--hypothesis-profile exploring)
        limit="${MEGATRON_ELASTIC_TEST_SECONDS:-14400}"
        ;;
    --)
        shift
        exec python -m pytest "$@"
        ;;
    *)
        echo "usage: bash scripts/test.sh [--all | -- PYTEST-ARGUMENTS]" >&2
        exit 1
        ;;
esac

# Every check runs, so that one call shows all that is wrong; the last line is pytest's.
status=0
check() {
    printf '== %s\n' "$1"
    shift
    "$@" || { status=1; printf '== failed: %s\n' "$*" >&2; }
}
mapfile -t native < <(git ls-files 'csrc/*.cpp' 'csrc/*.hpp' 'csrc/*.h')
mapfile -t shell < <(git ls-files '*.sh')
check "ruff" ruff check --quiet .
check "ruff format" ruff format --quiet --check .
check "mypy --strict (tests: not strict)" mypy --no-error-summary -p megatron.elastic -p tools -p tests -m megatron_elastic_torch
check "import-linter" lint-imports --no-cache --no-logo
[[ ${#shell[@]} -eq 0 ]] || check "shellcheck" shellcheck -x --severity=warning "${shell[@]}"
[[ ${#native[@]} -eq 0 ]] || check "clang-format" clang-format --dry-run --Werror "${native[@]}"
# One worker more than cores (up to eight of those): tests/scheduling.py keeps the last one for unit tests, so that no
# more jobs of several processes run at once than there are cores. What fails is run once more, and named as unstable if
# it passes then: tests with real processes and time-outs share the cores with whatever else runs. --kill-after: a hung
# test must not outlive the run.
run_pytest() {
    local cores
    cores="$(env -u OMP_NUM_THREADS nproc)" # nproc obeys that variable
    timeout --signal=INT --kill-after=30 "$limit" python -m pytest -q -n "$(((cores < 8 ? cores : 8) + 1))" --dist loadscope \
        --max-worker-restart 3 --reruns 1 --durations=30 "${selection[@]}"
}
check "subjects of commits" python tools/commit_subjects.py
check "pytest" run_pytest
exit "$status"
