# shellcheck shell=bash
# The one place that makes an environment: sourced by quickstart.sh and test.sh.
#
#   source scripts/env.sh && elastic_env            # the packages of a run
#   source scripts/env.sh && elastic_env dev        # and those of the tests
#   source scripts/env.sh && elastic_packages       # as elastic_env, without this package and its native parts
#
# Creates a virtual environment, installs the pins of requirements/ in the order
# that matters (torch first and alone), builds the native parts, activates it.
# Each stage leaves a stamp with a hash of its inputs, so that a
# second call does nothing.
#
#   MEGATRON_ELASTIC_VENV          where the environment lives (default: .venv of the checkout)
#   MEGATRON_ELASTIC_PYTHON        which interpreter makes it (default: the first python3.x >= 3.11)
#   MEGATRON_ELASTIC_MEGATRON      version of megatron-core instead of the pinned one (tools/versions.py)
#   MEGATRON_ELASTIC_TORCH         version of torch instead of the pinned one (tools/versions.py)
#   MEGATRON_ELASTIC_TORCH_INDEX   index to take torch from, e.g. PyTorch's own index of CPU builds
#                                  (default: pip's; on some machines that is the build with CUDA, several GB)

ELASTIC_ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

elastic_say() { printf '[env] %s\n' "$*" >&2; }

elastic_fail() {
    printf '[env] error: %s\n' "$*" >&2
    return 1
}

# The first interpreter that is new enough, by name.
elastic_find_python() {
    local name
    for name in ${MEGATRON_ELASTIC_PYTHON:-python3.11 python3.12 python3.13 python3}; do
        if command -v "$name" >/dev/null && "$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            command -v "$name"
            return 0
        fi
    done
    if [[ -n "${MEGATRON_ELASTIC_PYTHON:-}" ]]; then
        elastic_fail "MEGATRON_ELASTIC_PYTHON=$MEGATRON_ELASTIC_PYTHON is no Python >= 3.11 that can be run; give its whole path, or unset it"
    else
        elastic_fail "no Python >= 3.11 (Debian 12: apt install python3.11 python3.11-venv python3.11-dev), or set MEGATRON_ELASTIC_PYTHON"
    fi
}

elastic_hash() { cat "$@" | sha256sum | cut -d' ' -f1; }

# elastic_stage NAME HASH COMMAND... : run COMMAND unless the stamp NAME of this environment says HASH.
elastic_stage() {
    local stamp="$VIRTUAL_ENV/.elastic-$1" hash="$2"
    shift 2
    if [[ -f "$stamp" && "$(<"$stamp")" == "$hash" ]]; then
        return 0
    fi
    "$@" || return 1
    printf '%s' "$hash" >"$stamp"
}

elastic_pip() {
    # Tools of ours that call pip again must not ask for a newer one either.
    PIP_DISABLE_PIP_VERSION_CHECK=1 "$VIRTUAL_ENV/bin/python" -m pip install --quiet --no-input \
        --constraint "$ELASTIC_ROOT/requirements/constraints.txt" "$@"
}

# The requirement of megatron-core: the pin, or the version that the caller asks for.
elastic_megatron() {
    if [[ -n "${MEGATRON_ELASTIC_MEGATRON:-}" ]]; then
        printf 'megatron-core==%s' "$MEGATRON_ELASTIC_MEGATRON"
    else
        cat "$ELASTIC_ROOT/requirements/megatron.txt"
    fi
}

# The requirement of torch: the pin, or the version that the caller asks for.
elastic_torch() {
    if [[ -n "${MEGATRON_ELASTIC_TORCH:-}" ]]; then
        printf 'torch==%s' "$MEGATRON_ELASTIC_TORCH"
    else
        cat "$ELASTIC_ROOT/requirements/torch.txt"
    fi
}

elastic_install_run() {
    local requirements="$ELASTIC_ROOT/requirements" index=()
    if [[ -n "${MEGATRON_ELASTIC_TORCH_INDEX:-}" ]]; then
        index=(--index-url "$MEGATRON_ELASTIC_TORCH_INDEX")
    fi
    elastic_say "build tools (requirements/build.txt)"
    elastic_pip -r "$requirements/build.txt" || return 1
    # First and alone: a package that requires "torch" before it is there may bring another build.
    elastic_say "$(elastic_torch)"
    elastic_pip "${index[@]}" "$(elastic_torch)" || return 1
    elastic_say "what a run needs (requirements/runtime.txt)"
    elastic_pip -r "$requirements/runtime.txt" || return 1
    # It declares Python 3.12 and uses nothing newer than 3.11 (docs/dependencies.md).
    elastic_say "$(elastic_megatron)"
    elastic_pip --no-deps --no-build-isolation --ignore-requires-python --no-binary megatron-core "$(elastic_megatron)"
}

elastic_install_dev() {
    elastic_say "what the tests need (requirements/dev.txt, requirements/docs.txt)"
    elastic_pip -r "$ELASTIC_ROOT/requirements/dev.txt" -r "$ELASTIC_ROOT/requirements/docs.txt"
}

elastic_install_package() {
    elastic_say "this package and its native parts"
    (cd "$ELASTIC_ROOT" && elastic_pip --no-build-isolation --no-deps -e .)
}

# elastic_locked COMMAND...: run it while no other call makes parts of this environment.
elastic_locked() {
    local lock status path="${MEGATRON_ELASTIC_VENV:-$ELASTIC_ROOT/.venv}.lock"
    mkdir -p "$(dirname "$path")" && exec {lock}>"$path" && flock "$lock" || return 1
    "$@"
    status=$?
    exec {lock}>&-
    return "$status"
}

# elastic_packages [dev]: make the environment of the pins, then activate it.
elastic_packages() { elastic_locked elastic_make_packages "$@"; }

# elastic_env [dev]: make the missing parts, then activate.
elastic_env() { elastic_locked elastic_make_env "$@"; }

elastic_make_packages() {
    local venv="${MEGATRON_ELASTIC_VENV:-$ELASTIC_ROOT/.venv}" requirements="$ELASTIC_ROOT/requirements" python
    if [[ ! -x "$venv/bin/python" ]]; then
        python="$(elastic_find_python)" || return 1
        elastic_say "virtual environment $venv ($("$python" --version))"
        "$python" -m venv "$venv" ||
            elastic_fail "cannot make a virtual environment (Debian 12: apt install python3.11-venv)" || return 1
    fi
    # shellcheck disable=SC1091
    source "$venv/bin/activate"
    if [[ -z "${CXX:-}" ]] && ! command -v g++ >/dev/null && ! command -v clang++ >/dev/null; then
        elastic_fail "no C++ compiler (Debian 12: apt install g++), or set CXX" || return 1
    fi
    elastic_stage run "$(elastic_hash "$requirements/build.txt" <(elastic_torch) "$requirements"/{runtime,constraints}.txt <(elastic_megatron))" \
        elastic_install_run || elastic_fail "installing requirements/ failed" || return 1
    if [[ "${1:-}" == dev ]]; then
        elastic_stage dev "$(elastic_hash "$requirements"/{dev,docs,constraints}.txt)" \
            elastic_install_dev || elastic_fail "installing requirements/dev.txt and docs.txt failed" || return 1
    fi
}

elastic_make_env() {
    local native
    elastic_make_packages "$@" || return 1
    if ! compgen -G "$ELASTIC_ROOT/megatron/elastic/_*.so" >/dev/null; then
        rm -f "$VIRTUAL_ENV/.elastic-build" # cleaned away since
    fi
    mapfile -t native < <(find "$ELASTIC_ROOT/csrc" -type f \( -name '*.cpp' -o -name '*.hpp' -o -name '*.h' \) 2>/dev/null | sort)
    elastic_stage build "$ELASTIC_ROOT $(elastic_hash "$ELASTIC_ROOT"/{CMakeLists.txt,setup.py,pyproject.toml} "${native[@]}")" \
        elastic_install_package || elastic_fail "building the package failed" || return 1
}
