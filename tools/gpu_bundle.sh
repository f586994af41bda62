#!/usr/bin/env bash
# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
# Collect in out/gpu-bundle what a machine with Python 3.12 and torch alone lacks: the package, Megatron-Core, and the
# small packages that both need. tools/gpu_check.sh installs it there without a network.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

bundle=out/gpu-bundle
pins=requirements/stacks/current
most=60000000 # bytes: what may travel to such a machine beside a checkout
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

say() { echo "gpu-bundle: $*" >&2; }

# torch, and with it all that it alone needs, is dropped by a marker that is true nowhere.
echo "torch ; sys_platform == 'never'" >"$work/without-torch.txt"
.venv/bin/uv pip compile --quiet --no-header --no-annotate --python-version 3.12 --overrides "$work/without-torch.txt" \
  --constraint "$pins/lock.txt" --output-file "$work/pins.txt" requirements/core.txt "$pins/core.txt" pyproject.toml
grep '^pip==' "$pins/lock.txt" >>"$work/pins.txt" # such a machine need not have one
.venv/bin/pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir "$work/wheels" --requirement "$work/pins.txt"
.venv/bin/uv build --quiet --out-dir "$work/own" # by a source archive: build/ may hold what is no longer in the package
mv "$work"/own/*.whl "$work/wheels"
git ls-files -z testing | xargs -0 cp --parents --target-directory "$work/wheels" # the check itself, which no wheel has

if [[ -n $(git status --porcelain -- mbridge_fsdp_ckpt testing pyproject.toml) ]]; then changes=" with changes"; else changes=; fi
echo "$(git rev-parse HEAD)$changes" >"$work/wheels/commit"
size=$(du --bytes --summarize "$work/wheels" | cut -f 1)
if ((size > most)); then
  say "$size bytes are more than $most; the largest:"
  du --bytes "$work"/wheels/* | sort --numeric-sort --reverse | head -5 >&2
  exit 1
fi
rm -rf "$bundle"
mkdir -p "$(dirname "$bundle")"
mv "$work/wheels" "$bundle"
say "$bundle holds $(find "$bundle" -name '*.whl' | wc -l) wheels, $((size / 1000000)) MB"
