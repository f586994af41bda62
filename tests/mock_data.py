# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Megatron's mock data in small."""

from __future__ import annotations

DOCUMENTS = 1_000  # of 2,048 tokens on average: more than any test trains on


def fewer_documents() -> None:
    """Shuffling the samples of Megatron's own hundred thousand takes a second of each rank of each run."""
    from megatron.core.datasets.gpt_dataset import MockGPTLowLevelDataset

    MockGPTLowLevelDataset.size = DOCUMENTS
