# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""A script in the shape of Megatron-Bridge's `convert_checkpoints_fsdp.py`.  It knows nothing of this package.

    torchrun ... upstream_script.py import --hf-model HF --megatron-path CHECKPOINT --tp 2 --ep 2
    torchrun ... upstream_script.py export --hf-model HF --megatron-path CHECKPOINT --hf-path BACK --tp 2 --ep 2

Like that one it compares names: where the format is called `fsdp_dtensor` it exports from a model wrapped in
Megatron-FSDP, else from one that `load_megatron_model` built; and it saves with `low_memory_save` unless the format is
called so.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from megatron.bridge import AutoBridge
from megatron.bridge.training.checkpointing import load_checkpoint
from megatron.bridge.training.config import CheckpointConfig, ConfigContainer, LoggerConfig, OptimizerConfig
from megatron.bridge.training.model_load_save import save_megatron_model
from megatron.bridge.training.state import GlobalState
from megatron.core.distributed import DistributedDataParallelConfig


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("import", "export"):
        command = commands.add_parser(name)
        command.add_argument("--hf-model", required=True)
        command.add_argument("--megatron-path", required=True)
        command.add_argument("--tp", type=int, default=1)
        command.add_argument("--ep", type=int, default=1)
        command.add_argument("--ckpt-format", choices=["torch_dist", "fsdp_dtensor"], default="fsdp_dtensor")
        if name == "import":
            command.add_argument("--no-low-memory-save", action="store_true")
        else:
            command.add_argument("--hf-path", required=True)
    return parser.parse_args()


def wrapped_model(bridge: Any, args: argparse.Namespace) -> tuple[Any, Any, Any]:
    provider = bridge.to_megatron_provider(load_weights=False)
    provider.tensor_model_parallel_size, provider.expert_model_parallel_size = args.tp, args.ep
    provider.pipeline_dtype = provider.params_dtype = torch.bfloat16
    provider.gradient_accumulation_fusion = False
    provider.finalize()
    provider.initialize_model_parallel(seed=0)
    ddp = DistributedDataParallelConfig(
        use_distributed_optimizer=True, use_megatron_fsdp=True, data_parallel_sharding_strategy="optim_grads_params"
    )
    return provider, ddp, provider.provide_distributed_model(ddp_config=ddp, use_megatron_fsdp=True)


def import_model(bridge: Any, args: argparse.Namespace) -> None:
    _, _, model = wrapped_model(bridge, args)
    bridge.load_hf_weights(model)
    save_megatron_model(
        model,
        args.megatron_path,
        ckpt_format=args.ckpt_format,
        hf_tokenizer_path=args.hf_model,
        low_memory_save=not args.no_low_memory_save and args.ckpt_format != "fsdp_dtensor",
    )


def loaded_model(bridge: Any, args: argparse.Namespace) -> Any:
    if args.ckpt_format != "fsdp_dtensor":
        sizes = {"tensor_model_parallel_size": args.tp, "expert_model_parallel_size": args.ep}
        model = bridge.load_megatron_model(args.megatron_path, mp_overrides=sizes, wrap_with_ddp=False)
        return [chunk.cuda() for chunk in model]
    provider, ddp, model = wrapped_model(bridge, args)
    state = GlobalState()
    state.cfg = ConfigContainer(
        model=provider,
        train=None,
        optimizer=OptimizerConfig(use_distributed_optimizer=False),
        ddp=ddp,
        scheduler=None,
        dataset=None,
        logger=LoggerConfig(),
        tokenizer=None,
        checkpoint=CheckpointConfig(
            load=args.megatron_path, finetune=True, load_optim=False, load_rng=False, ckpt_format=args.ckpt_format
        ),
        dist=None,
    )
    load_checkpoint(state=state, model=model, optimizer=None, opt_param_scheduler=None, strict=True)
    return model


def main() -> None:
    args = arguments()
    bridge = AutoBridge.from_hf_pretrained(args.hf_model, torch_dtype=torch.bfloat16)
    if args.command == "import":
        import_model(bridge, args)
    else:
        bridge.save_hf_pretrained(loaded_model(bridge, args), args.hf_path, show_progress=False, strict=True)


if __name__ == "__main__":
    main()
