# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""`mbridge_fsdp_ckpt run pretrain_gpt.py ...` on ranks that live on."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

from typer.testing import CliRunner

from testing.kernels import replace_cuda_only_kernels
from testing.ranks import no_process_group
from tests.applied import applied_numbers
from tests.mock_data import fewer_documents

SCRIPT = Path(__file__).parent / "pretrain_gpt.py"
_MODEL = shlex.split("""
    --num-layers 2 --hidden-size 32 --num-attention-heads 4 --ffn-hidden-size 48 --swiglu --normalization RMSNorm
    --position-embedding-type rope --disable-bias-linear --untie-embeddings-and-output-weights --transformer-impl local
    --seq-length 32 --max-position-embeddings 32 --attention-dropout 0 --hidden-dropout 0 --bf16
    --mock-data --tokenizer-type NullTokenizer --vocab-size 127 --make-vocab-size-divisible-by 8 --num-workers 0
    --no-create-attention-mask-in-dataloader
    --micro-batch-size 1 --eval-iters 0 --eval-interval 1000 --log-interval 1
    --lr 1e-3 --min-lr 0 --lr-decay-iters 100 --lr-warmup-iters 0 --lr-decay-style cosine
    --use-distributed-optimizer
    --no-gradient-accumulation-fusion --no-persist-layer-norm --no-masked-softmax-fusion --no-bias-swiglu-fusion
    --no-bias-dropout-fusion --no-rope-fusion --no-check-for-nan-in-loss-and-grad
    --distributed-backend gloo --distributed-timeout-minutes 5 --no-gradient-reduce-div-fusion
""")
_FSDP = ["--use-megatron-fsdp", "--data-parallel-sharding-strategy", "optim_grads_params"]
_NOT_IN_A_WHEEL: dict[str, Any] = {"modelopt.torch.distill.plugins.megatron": None}
"""With ModelOpt, megatron-core 0.18 needs `megatron.post_training`, which only a checkout of Megatron-LM has."""


@no_process_group
def pretrain(
    ckpt_format: str,
    directory: str,
    iterations: int,
    *more: str,
    save_every: int = 2,
    load: bool = True,
    wrapped: bool = True,
    takeover: bool = False,
) -> dict[str, Any]:
    """Train; how the command ended, and what the optimizer's kernels were handed in each iteration."""
    replace_cuda_only_kernels()
    fewer_documents()
    where = ["--ckpt-format", ckpt_format, "--save", directory, *(["--load", directory] if load else [])]
    how_long = ["--train-iters", str(iterations), "--save-interval", str(save_every)]
    where += _FSDP if wrapped else []
    batch = [] if "--step-batch-size-schedule" in more else ["--global-batch-size", "8"]
    container: Any = argparse._ActionsContainer
    with ExitStack() as stack:
        stack.enter_context(patch.object(sys, "argv", list(sys.argv)))
        stack.enter_context(patch.object(sys, "path", list(sys.path)))
        stack.enter_context(patch.object(container, "add_argument", container.add_argument))
        stack.enter_context(patch.dict(sys.modules, _NOT_IN_A_WHEEL))
        stack.enter_context(patch.dict(os.environ, CUDA_DEVICE_MAX_CONNECTIONS="8" if wrapped else "1"))
        from mbridge_fsdp_ckpt.integrations import megatron_lm
        from mbridge_fsdp_ckpt.tools.command import run  # noqa: F401
        from mbridge_fsdp_ckpt.tools.command.app import main  # noqa: F401
        from mbridge_fsdp_ckpt.tools.command.console import app

        applied = stack.enter_context(applied_numbers())
        command = ["run", *(["--takeover"] if takeover else []), str(SCRIPT)]
        try:
            result = CliRunner().invoke(app, [*command, *_MODEL, *batch, *where, *how_long, *more])
        finally:
            megatron_lm.unregister()
            _forget()
    warned = [line for line in result.output.splitlines() if line.startswith("WARNING: ")]
    return {"code": result.exit_code, "out": result.output[-20_000:], "warned": warned, "applied": applied}


def _forget() -> None:
    from megatron.training import checkpointing, global_vars

    global_vars.destroy_global_vars()
    checkpointing._CHECKPOINT_VERSION = None
    checkpointing._LOADED_ITERATION = None
