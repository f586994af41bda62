# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""All that `megatron.training` imports, but not itself: each case imports that afresh, as a script does."""

from __future__ import annotations

import argparse
import sys
from typing import Any

_container: Any = argparse._ActionsContainer
_add_argument = _container.add_argument

import megatron.core.datasets.blended_megatron_dataset_builder  # noqa: E402
import megatron.core.datasets.gpt_dataset  # noqa: E402
import megatron.core.tokenizers.utils.build_tokenizer  # noqa: E402
import megatron.training  # noqa: E402, F401

_container.add_argument = _add_argument  # what the import replaces
for _name in [name for name in sys.modules if name.split(".")[:2] == ["megatron", "training"]]:
    del sys.modules[_name]
