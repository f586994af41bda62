# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash
# Source this before running anything from .venv, or with STACK=NAME from .venv-NAME:  . tools/env.sh
# It sets no shell options, because people source it in their own shells.
_root=$(cd "$(dirname "${BASH_SOURCE[0]:-$0}")/.." && pwd)
_venv=$_root/.venv
[[ ${STACK:-current} == current ]] || _venv+=-$STACK
_nvidia=$_venv/lib/python3.12/site-packages/nvidia

export PATH=$_venv/bin:$PATH
# Test support and recipes lie beside the package, and are not installed with it.
export PYTHONPATH=$_root${PYTHONPATH:+:$PYTHONPATH}
# Transformer Engine opens CUDA's libraries by name; where no CUDA toolkit is installed, only torch's wheels hold them.
export LD_LIBRARY_PATH=$_nvidia/nccl/lib:$_nvidia/cudnn/lib:$_nvidia/cu13/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
# Every rank imports torch and Megatron; without their bytecode on disk each one compiles them again.
unset PYTHONDONTWRITEBYTECODE
# Runs must repeat bit for bit, and many ranks share few cores.
export CUBLAS_WORKSPACE_CONFIG=:4096:8 NCCL_ALGO=Ring NVTE_ALLOW_NONDETERMINISTIC_ALGO=0
export OMP_NUM_THREADS=1 TORCHDYNAMO_DISABLE=1

unset _root _venv _nvidia
