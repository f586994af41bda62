# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""VeRL learns the format name `fsdp_dtensor_safe`; see docs/verl.md.

VeRL imports this module on the driver and in every Ray worker, through the entry point in `verl.plugins` or by
VERL_USE_EXTERNAL_MODULES=mbridge_fsdp_ckpt.integrations.verl.  That happens before Ray gives out devices: the import
loads neither torch nor Megatron, and replaces something only once VeRL itself imports what is replaced.
"""

from mbridge_fsdp_ckpt.integrations.verl.plugin import install, uninstall

__all__ = ["install", "uninstall"]

install()
