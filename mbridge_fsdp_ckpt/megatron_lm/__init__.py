"""The only place that knows `megatron.training`, Megatron-LM's own training loop."""

from mbridge_fsdp_ckpt.megatron_lm.plugin import register, unregister

__all__ = ["register", "unregister"]
