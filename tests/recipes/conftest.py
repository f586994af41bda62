# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Bridge's ranks, patient with gloo."""

from tests.bridge.conftest import bridge_ranks

__all__ = ["bridge_ranks"]
