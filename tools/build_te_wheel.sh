#!/usr/bin/env bash
# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
# Compile Transformer Engine's torch extension, once for each machine, and print the wheel's path.
# The registry has sources only; their build looks for a wheel that NVIDIA released for this torch, and else compiles. CUDA's
# headers come from wheels, so no CUDA toolkit is needed. pip's cache is left out: it would offer a wheel compiled for another torch.
# usage: [STACK=NAME] tools/build_te_wheel.sh        after tools/setup.sh uv; MAX_JOBS limits the compilers (about 2 GB each)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

say() { echo "build_te_wheel: $*" >&2; }

stack=${STACK:-current}
pins=requirements/stacks/$stack
venv=$PWD/.venv
[[ $stack == current ]] || venv+=-$stack

pinned() { sed -n "s/^$2==//p" "$pins/$1.txt"; }

torch=$(pinned core torch)
te=$(pinned full transformer-engine)
python=$venv/bin/python
platform=$("$python" -c 'import sysconfig; print("cp" + sysconfig.get_config_var("py_version_nodot"), sysconfig.get_platform(), sep="-")')
cache=${MBRIDGE_FSDP_CKPT_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/mbridge_fsdp_ckpt}/wheels
home=$cache/te$te-torch$torch-$platform

if [[ ! -d $home ]]; then
  python_h=$("$python" -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h
  if ! command -v g++ >/dev/null || [[ ! -f $python_h ]]; then
    say "needs g++ and Python's headers, $python_h (Debian: apt-get install g++ python3.12-dev)"
    exit 1
  fi
  say "compiling transformer-engine-torch $te for torch $torch: about 10 minutes on two cores, this once"
  say "the wheel is kept in $home"
  mkdir -p "$cache"
  work=$(mktemp -d "$cache/building.XXXXXX")
  trap 'rm -rf "$work"' EXIT
  export VIRTUAL_ENV=$work/venv
  uv=$venv/bin/uv
  "$uv" venv --quiet --python "$python" "$VIRTUAL_ENV"
  "$uv" pip install --quiet --constraint "$pins/lock.txt" --requirements requirements/build.txt --requirements "$pins/cuda.txt" \
    "torch==$torch"
  site=$("$VIRTUAL_ENV/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  export PATH=$VIRTUAL_ENV/bin:$PATH
  export CUDA_HOME=$site/nvidia/cu13 NVTE_BUILD_USE_NVIDIA_WHEELS=1 MAX_JOBS=${MAX_JOBS:-$(nproc)}
  python -m pip wheel --no-cache-dir --no-build-isolation --no-deps --wheel-dir "$work/dist" "transformer-engine-torch==$te" >&2
  mv --no-clobber --no-target-directory "$work/dist" "$home"
fi
echo "$home"/*.whl
