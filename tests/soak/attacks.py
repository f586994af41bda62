# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""All attacks, by name."""

from __future__ import annotations

from tests.soak import attacks_growth, attacks_safe, attacks_stock, attacks_types
from tests.soak.hostile import Attack

ATTACKS: dict[str, Attack] = {
    **dict(attacks_safe.attacks()),
    **dict(attacks_stock.attacks()),
    **dict(attacks_growth.attacks()),
    **dict(attacks_types.attacks()),
}
