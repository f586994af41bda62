# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Bridge's ranks, and what several tests convert."""

from tests.bridge.conftest import bridge_ranks
from tests.convert.storage_runs import safe_run, stock_run

__all__ = ["bridge_ranks", "safe_run", "stock_run"]
