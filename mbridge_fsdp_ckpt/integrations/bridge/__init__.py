# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""The only place that knows Megatron-Bridge."""

from mbridge_fsdp_ckpt.integrations.bridge.plugin import register, unregister

__all__ = ["register", "unregister"]
