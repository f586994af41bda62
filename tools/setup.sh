#!/usr/bin/env bash
# Bring .venv up to a level, and do nothing where it is there already.
# usage: tools/setup.sh uv|core|dev|full
#   uv     an empty .venv with the installer in it
#   core   the package, torch, Megatron-Core: what the demo needs
#   dev    core, and the tests' and linters' tools
#   full   dev, Megatron-Bridge, Transformer Engine and VeRL
# A step that ended leaves a stamp with a hash of everything it depends on. A step that did not end leaves
# .venv/.unfinished: what it installed can't be trusted, so the next run starts .venv again.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

uv_version=0.13.8
python=${PYTHON:-python3.12}
hash=$(cat pyproject.toml requirements/*.txt tools/setup.sh tools/build_te_wheel.sh | sha256sum)

say() { echo "setup: $*" >&2; }

install() {
  if ! VIRTUAL_ENV=$PWD/.venv .venv/bin/uv pip install --constraint requirements/lock.txt "$@"; then
    say "that failed; if a pin in requirements/ was changed, 'make lock' brings lock.txt up to it"
    exit 1
  fi
}

create_venv() {
  if ! "$python" -c 'import sys, venv; sys.exit(sys.version_info[:2] != (3, 12))' 2>/dev/null; then
    say "'$python' is missing or isn't Python 3.12. Install Python 3.12 with its venv module (Debian: python3.12-venv;"
    say "pyenv: pyenv install 3.12; uv: uv python install 3.12), or name one: make PYTHON=/path/to/python3.12 TARGET"
    exit 1
  fi
  rm -rf .venv
  mkdir .venv
  touch .venv/.unfinished
  "$python" -m venv .venv
  .venv/bin/pip install --quiet --disable-pip-version-check "uv==$uv_version"
}

install_core() { install --requirements requirements/core.txt --editable .; }

install_dev() { install --requirements requirements/dev.txt; }

install_full() {
  install --overrides requirements/overrides.txt --requirements requirements/full.txt
  install --no-deps --python-platform "$(uname -m)-manylinux_2_40" --requirements requirements/no-deps.txt
  install --no-deps "$te_wheel"
}

step() {
  local stamp=.venv/.ready-$1
  [[ -f $stamp && $(<"$stamp") == "$hash" ]] && return
  say "installing $1"
  if [[ $1 == full ]]; then
    te_wheel=$(tools/build_te_wheel.sh) # here, because a compilation that is interrupted must not cost .venv
  fi
  touch .venv/.unfinished
  "install_$1"
  echo "$hash" >"$stamp"
  rm .venv/.unfinished
}

case ${1:-} in
  uv) steps=() ;;
  core) steps=(core) ;;
  dev) steps=(core dev) ;;
  full) steps=(core dev full) ;;
  *) say "usage: tools/setup.sh uv|core|dev|full" && exit 2 ;;
esac
if [[ -e .venv/.unfinished ]] || ! .venv/bin/uv --version >/dev/null 2>&1; then
  create_venv
fi
for name in "${steps[@]}"; do
  step "$name"
done
