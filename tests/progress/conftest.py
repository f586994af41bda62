# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Ranks of every framework whose checkpoints the others read."""

from __future__ import annotations

from tests.bridge.conftest import bridge_ranks as bridge_ranks
from tests.megatron_lm.conftest import training_ranks as training_ranks
from tests.verl.conftest import verl_ranks as verl_ranks
