#!/usr/bin/env bash
# Builds the source distribution and, from it, the wheel for this Python, and checks both.
#
#   bash scripts/build_packages.sh [FOLDER]      # default: dist
#
# The wheel holds native parts for the torch of requirements/torch.txt and gets the oldest manylinux tag that they
# allow. torch's own libraries stay outside of it: they are loaded before the native parts are.
#
#   MEGATRON_ELASTIC_URL   the repository's page on GitHub, for links in the packages' description (default: no links)
set -euo pipefail
shopt -s inherit_errexit
cd "$(dirname "${BASH_SOURCE[0]}")/.."
folder="$(realpath -m "${1:-dist}")"
source scripts/env.sh
elastic_packages
elastic_stage package "$(elastic_hash requirements/{package,constraints}.txt)" elastic_pip -r requirements/package.txt

work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
python -m build --no-isolation --outdir "$work/built" . >&2 # the wheel from the source distribution
python -m auditwheel repair --exclude 'libtorch*.so' --exclude libc10.so --wheel-dir "$work/checked" "$work"/built/*.whl >&2
mv "$work"/built/*.tar.gz "$work/checked/"
python -m twine check --strict "$work"/checked/* >&2
mkdir -p "$folder"
mv "$work"/checked/* "$folder/"
ls "$folder"
