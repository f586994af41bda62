# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""The only place that knows `megatron.training`, Megatron-LM's own training loop."""

from mbridge_fsdp_ckpt.integrations.megatron_lm.plugin import register, unregister

__all__ = ["register", "unregister"]
