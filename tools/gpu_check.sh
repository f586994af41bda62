#!/usr/bin/env bash
# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
# Install a bundle of tools/gpu_bundle.sh beside this machine's torch, in a temporary folder and without a network, and
# check the package there. Nothing of the machine's own Python is changed.
# usage: tools/gpu_check.sh BUNDLE [--cpu] [--ranks N] [--bytes N] [--out FILE] ...     (docs/gpu.md; PYTHON names another one)
set -euo pipefail

python=${PYTHON:-python3}
install_limit=120 # seconds

say() { echo "gpu-check: $*" >&2; }

if [[ $# == 0 || ! -f $1/commit ]]; then
  say "usage: tools/gpu_check.sh BUNDLE [options], where BUNDLE is the folder that 'make gpu-bundle' made"
  exit 2
fi
bundle=$(cd "$1" && pwd)
shift
if ! "$python" -c 'import sys, importlib.util as u; sys.exit(sys.version_info[:2] != (3, 12) or not u.find_spec("torch"))'; then
  say "'$python' isn't Python 3.12 with torch; PYTHON=/path/to/python3.12 names another one"
  exit 1
fi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

pip=("$bundle"/pip-*.whl) # the machine need not have one
# All of the bundle, whatever the machine has of it: pip would hold what is there against all that torch declares.
timeout "$install_limit" "$python" "${pip[0]}/pip" --isolated install --quiet --no-index --no-deps --no-warn-conflicts \
  --disable-pip-version-check --target "$work" "$bundle"/*.whl
export PYTHONPATH=$work:$bundle${PYTHONPATH:+:$PYTHONPATH}
"$python" -P -m testing.gpu --commit "$(<"$bundle/commit")" "$@"
