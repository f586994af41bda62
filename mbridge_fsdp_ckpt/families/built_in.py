# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""The families that come with this package."""

from mbridge_fsdp_ckpt.families.declaration import Family
from mbridge_fsdp_ckpt.families.gated_delta_net import GatedDeltaNetFamily
from mbridge_fsdp_ckpt.families.gated_linear_unit import GatedLinearUnitFamily
from mbridge_fsdp_ckpt.families.latent_attention import LatentAttentionFamily
from mbridge_fsdp_ckpt.families.mamba import MambaFamily

FAMILIES: tuple[Family, ...] = (
    GatedDeltaNetFamily(),
    GatedLinearUnitFamily(),
    LatentAttentionFamily(),
    MambaFamily(),
)
