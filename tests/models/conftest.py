# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Bridge's ranks, as the tests of the training loop have them."""

from tests.bridge.conftest import bridge_ranks

__all__ = ["bridge_ranks"]
