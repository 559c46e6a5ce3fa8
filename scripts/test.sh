#!/usr/bin/env bash
# Sets itself up (scripts/env.sh) and runs the checks.
#
#   bash scripts/test.sh            lint, types, unit, integration and short chaos tests: about 25 minutes on 2 cores
#   bash scripts/test.sh --all      everything, slow tests included
#   bash scripts/test.sh -- ARGS    set up, then pytest ARGS (for one test while working on it)
#
# MEGATRON_ELASTIC_TEST_SECONDS bounds the run of pytest (default 2400, with --all 14400).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/env.sh
elastic_env dev

export OMP_NUM_THREADS=1 PYTHONUNBUFFERED=1 MPLBACKEND=Agg
limit="${MEGATRON_ELASTIC_TEST_SECONDS:-2400}"
selection=(-m "not slow")
case "${1:-}" in
    "") ;;
    --all)
        selection=()
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
check "mypy --strict (tests: not strict)" mypy --no-error-summary -p megatron.elastic -p tools -p tests
[[ ${#shell[@]} -eq 0 ]] || check "shellcheck" shellcheck -x --severity=warning "${shell[@]}"
[[ ${#native[@]} -eq 0 ]] || check "clang-format" clang-format --dry-run --Werror "${native[@]}"
logs="$(mktemp -d)"
trap 'rm -rf "$logs"' EXIT

# lane SECONDS NAME ARGUMENTS...: one run of pytest that remembers by itself what failed in it. --kill-after: a hung test
# must not outlive the run; a background job of a script ignores SIGINT unless it is told otherwise.
lane() {
    local seconds="$1" name="$2"
    shift 2
    timeout --signal=INT --kill-after=30 "$seconds" env --default-signal=INT \
        python -m pytest -q -o "cache_dir=.pytest_cache/$name" "${selection[@]}" "$@"
}

# The closing lines of several runs as one.
added_up() {
    awk '{ for (i = 1; i < NF; i++) if ($i ~ /^[0-9]+$/) { word = $(i + 1); sub(/,$/, "", word); count[word] += $i } }
         END { text = ""
               split("failed passed skipped deselected xfailed xpassed warnings error errors", order)
               for (i = 1; i in order; i++) if (count[order[i]])
                   text = text (text ? ", " : "") count[order[i]] " " order[i]
               printf "%s in %d.0s\n", text, seconds }' seconds="$SECONDS" \
        <(grep -hE '^[=]* ?[0-9]+ (passed|failed|error|skipped|deselected).* in [0-9.]+s' "$@")
}

# Two lanes of about the same length: tests of one process, which leave a core to others, jobs compared with plain
# Megatron's and those that end with a finding; the other jobs, whose ranks wait for each other most of the time. Tests with real processes and time-outs
# share two cores with whatever else runs: what fails is run once more, alone, and named as unstable if it passes then.
calm=(tests/integration/test_{cpu_layouts,engine_parity,precision,schedules,certificates,silent_corruption}.py)
units=(tests/unit tests/chaos "${calm[@]}")
others=(tests/integration "${calm[@]/#/--ignore=}")
run_pytest() {
    local pid unit=0 jobs=0
    SECONDS=0
    lane "$limit" unit --durations=15 "${units[@]}" >"$logs/unit" 2>&1 &
    pid=$!
    lane "$limit" jobs --durations=15 "${others[@]}" 2>&1 | tee "$logs/jobs" || jobs=$?
    wait "$pid" || unit=$?
    cat "$logs/unit"
    added_up "$logs/unit" "$logs/jobs"
    [[ $unit -le 1 && $jobs -le 1 ]] || return 1 # cut short, or worse: which tests were not run, nobody knows
    if [[ $unit -eq 1 ]]; then
        printf '== unstable or broken, once more alone:\n'
        lane 300 unit --last-failed "${units[@]}" && unit=0
    fi
    if [[ $jobs -eq 1 ]]; then
        printf '== unstable or broken, once more alone:\n'
        lane 300 jobs --last-failed "${others[@]}" && jobs=0
    fi
    [[ $unit -eq 0 && $jobs -eq 0 ]]
}
check "pytest" run_pytest
exit "$status"
