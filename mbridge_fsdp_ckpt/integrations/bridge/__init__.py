"""The only place that knows Megatron-Bridge."""

from mbridge_fsdp_ckpt.integrations.bridge.plugin import register, unregister

__all__ = ["register", "unregister"]
