#!/usr/bin/env bash
# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
# Bring a stack's environment up to a level, and do nothing where it is there already.
# usage: [STACK=NAME] tools/setup.sh uv|core|dev|full
#   uv     an empty environment with the installer in it
#   core   the package, torch, Megatron-Core: what the demo needs
#   dev    core, and the tests' and linters' tools
#   full   dev, and Megatron-Bridge, Transformer Engine, VeRL, where the stack has them
# A stack is a folder of requirements/stacks. "current" goes into .venv, NAME into .venv-NAME.
# A step that ended leaves a stamp with a hash of everything it depends on. A step that did not end leaves
# .unfinished there: what it installed can't be trusted, so the next run starts the environment again.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

say() { echo "setup: $*" >&2; }

uv_version=0.13.8
python=${PYTHON:-python3.12}
stack=${STACK:-current}
pins=requirements/stacks/$stack
if [[ ! -f $pins/core.txt ]]; then
  say "there is no stack '$stack'; there are: $(cd requirements/stacks && echo *)"
  exit 2
fi
venv=$PWD/.venv
[[ $stack == current ]] || venv+=-$stack
hash=$(cat pyproject.toml requirements/*.txt "$pins"/*.txt tools/setup.sh tools/build_te_wheel.sh | sha256sum)

install_alone() {
  if ! VIRTUAL_ENV=$venv "$venv/bin/uv" pip install --constraint "$pins/lock.txt" "$@"; then
    say "that failed; if a pin in requirements/ was changed, 'make lock STACK=$stack' brings lock.txt up to it"
    exit 1
  fi
}

# With dependencies, as far as overrides.txt leaves them.
install() {
  local overrides=()
  [[ ! -f $pins/overrides.txt ]] || overrides=(--overrides "$pins/overrides.txt")
  install_alone "${overrides[@]}" "$@"
}

create_venv() {
  if ! "$python" -c 'import sys, venv; sys.exit(sys.version_info[:2] != (3, 12))' 2>/dev/null; then
    say "'$python' is missing or isn't Python 3.12. Install Python 3.12 with its venv module (Debian: python3.12-venv;"
    say "pyenv: pyenv install 3.12; uv: uv python install 3.12), or name one: make PYTHON=/path/to/python3.12 TARGET"
    exit 1
  fi
  rm -rf "$venv"
  mkdir "$venv"
  touch "$venv/.unfinished"
  "$python" -m venv "$venv"
  "$venv/bin/pip" install --quiet --disable-pip-version-check "uv==$uv_version"
}

install_core() { install --requirements requirements/core.txt --requirements "$pins/core.txt" --editable .; }

install_dev() {
  install --requirements requirements/dev.txt --requirements "$pins/dev.txt" --requirements "$pins/core.txt"
}

install_full() {
  [[ -f $pins/full.txt ]] || return 0
  install --requirements "$pins/core.txt" --requirements "$pins/full.txt" \
    --requirements requirements/core.txt --requirements requirements/full.txt
  install_alone --no-deps --python-platform "$(uname -m)-manylinux_2_40" --requirements "$pins/no-deps.txt"
  install_alone --no-deps "$te_wheel"
}

step() {
  local stamp=$venv/.ready-$1
  [[ -f $stamp && $(<"$stamp") == "$hash" ]] && return
  say "installing $1 of the stack '$stack'"
  if [[ $1 == full && -f $pins/full.txt ]]; then
    te_wheel=$(tools/build_te_wheel.sh) # here, because a compilation that is interrupted must not cost the environment
  fi
  touch "$venv/.unfinished"
  "install_$1"
  echo "$hash" >"$stamp"
  rm "$venv/.unfinished"
}

case ${1:-} in
  uv) steps=() ;;
  core) steps=(core) ;;
  dev) steps=(core dev) ;;
  full) steps=(core dev full) ;;
  *) say "usage: [STACK=NAME] tools/setup.sh uv|core|dev|full" && exit 2 ;;
esac
if [[ -e $venv/.unfinished ]] || ! "$venv/bin/uv" --version >/dev/null 2>&1; then
  create_venv
fi
for name in "${steps[@]}"; do
  step "$name"
done
