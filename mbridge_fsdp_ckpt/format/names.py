# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""What files of a checkpoint, and what lies beside it, are called: each name is made and read here."""

from __future__ import annotations

import re
import uuid
from dataclasses import dataclass
from typing import Final

FORMAT_NAME: Final = "fsdp_dtensor_safe"
STOCK_FORMAT: Final = "fsdp_dtensor"

MANIFEST_NAME: Final = "manifest.json"
"""Our metadata."""

DCP_METADATA: Final = ".metadata"
"""Stock's metadata of a checkpoint; ours may have one beside its own, for stock to read."""

TORCH_DIST_METADATA: Final = "metadata.json"
"""What Megatron tells a checkpoint in the format `torch_dist` by."""

TRACKER: Final = "latest_checkpointed_iteration.txt"
"""Megatron's file in the root of a run's checkpoints that names the newest of them."""

STATE_TRACKER: Final = "latest_train_state.pt"
"""Megatron-Bridge's file for the same."""

RELEASE: Final = "release"
"""Name of a directory of weights without training progress, and what a tracker says of it."""

PROGRESS: Final = "train_state"
"""Bridge's iteration, samples and operations so far, among a checkpoint's values."""

TRAIN_STATE: Final = "train_state.pt"
"""Where stock Bridge keeps them, beside the tensors."""

MAX_TRAIN_STATE_BYTES: Final = 1 << 28

ARGUMENTS: Final = "args"
"""Megatron-LM's arguments, among a checkpoint's values: consumed samples, and what a load compares."""

OPTIMIZER: Final = "optimizer"
PARAM_GROUPS: Final = "param_groups"
"""Where torch's `get_state_dict` has param groups: `optimizer.param_groups`, a list."""

KEPT_ARGUMENTS: Final = (
    *("consumed_train_samples", "skipped_train_samples", "consumed_valid_samples"),
    *("num_layers", "hidden_size", "num_attention_heads", "add_position_embedding", "max_position_embeddings"),
    *("data_parallel_random_init", "make_vocab_size_divisible_by", "tokenizer_type", "global_batch_size"),
    *("hybrid_layer_pattern", "hybrid_override_pattern"),  # by which stock tells a hybrid's checkpoint from a GPT's
)
"""Which of them: Megatron-LM has a thousand."""

INDEXES: Final = "rank_*.index"
"""Pattern of the index files of ranks in a directory."""

ITERATION: Final = "iter_"
"""What the name of an iteration directory begins with, as Megatron has it."""

STAGING: Final = ".staging-"
REPLACED: Final = ".replaced-"
DELETED: Final = ".deleted-"
READING: Final = ".reading-"
"""What names begin with that stand beside a checkpoint: see `commit.rename` and `.retention`."""

_ITERATION = re.compile(rf"{ITERATION}(\d+)")
_BESIDE = re.compile(r"\.(?:staging|replaced|deleted)-(.+)-[0-9a-f]{12}", re.DOTALL)
_READING = re.compile(r"\.reading-(.+)-[0-9a-f]{12}", re.DOTALL)
_PAYLOAD = re.compile(r"__(\d+)_\d+.*\.distcp")
_SUFFIXED = re.compile(
    r"(?:__\d+_\d+|(?:rank|group)_\d+)(-[0-9a-f]{12})\.(?:distcp|index)|__(?:added|saving)(-[0-9a-f]{12})(?:/.*)?",
    re.DOTALL,
)
_PART = re.compile(
    rf"{re.escape(MANIFEST_NAME)}|{re.escape(DCP_METADATA)}|(rank|group)_\d+[^/]*\.index|__[^/]*\.distcp"
    r"|__(added|saving)-[0-9a-f]{12}(/.*)?",
    re.DOTALL,
)


def token() -> str:
    """What tells one save, or one reader, from all others."""
    return uuid.uuid4().hex[:12]


def payload_name(rank: int, suffix: str = "", file: int = 0) -> str:
    """A rank's payload file; rank 0's second one has what DCP metadata says besides tensors."""
    return f"__{rank}_{file}{suffix}.distcp"


@dataclass(frozen=True, slots=True)
class Files:
    """What the files of one save are called.

    Args:
        save: What tells it from all others; its index files and its metadata have it.
        suffix: What the names of payload and index files end with, before their extension.
    """

    save: str
    suffix: str = ""

    def payload(self, rank: int) -> str:
        """A rank's payload."""
        return payload_name(rank, self.suffix)

    def of_rank(self, rank: int) -> str:
        """A rank's own index file."""
        return f"rank_{rank:05d}{self.suffix}.index"

    def are_of_ranks(self, name: str) -> bool:
        """Whether a file is what ranks of the save write: payload, or an index file."""
        return (
            re.fullmatch(rf"(?:__\d+_0{self.suffix}\.distcp|(?:rank|group)_\d+{self.suffix}\.index)", name) is not None
        )

    def added(self, name: str) -> str:
        """A file that the caller added: in an object store in a folder of its save's own."""
        return f"__added{self.suffix}/{name}" if self.suffix else name

    @property
    def lease(self) -> str:
        """What those who write the save into an object store renew."""
        return f"__saving{self.suffix}"

    def of_group(self, rank: int) -> str:
        """The index file of the group that a rank leads."""
        return f"group_{rank:05d}{self.suffix}.index"


def rank_of_payload(name: str, unknown: int = 0) -> int:
    """The rank whose payload is named so, `__3_0.distcp` is rank 3's; `unknown` where the name does not say."""
    match = _PAYLOAD.fullmatch(name)
    return int(match[1]) if match else unknown


def suffix_of(name: str) -> str:
    """What a save into an object store appended to the names of its own files; empty in other names.

    Args:
        name: In the checkpoint: files that the caller added lie in a folder.
    """
    match = _SUFFIXED.fullmatch(name)
    return match[1] or match[2] if match else ""


def is_part(name: str) -> bool:
    """Whether a checkpoint's file is its metadata, stock's, payload or an index file."""
    return _PART.fullmatch(name) is not None


def is_head(name: str) -> bool:
    """Whether a file is what makes a directory a checkpoint: our metadata, or stock's."""
    return name in (MANIFEST_NAME, DCP_METADATA)


def iteration_name(number: int) -> str:
    """An iteration's directory."""
    return f"{ITERATION}{number:07d}"


def iteration_of(name: str) -> int | None:
    """The number in a directory's name, if it is an iteration's."""
    match = _ITERATION.fullmatch(name)
    return int(match[1]) if match else None


def beside(mark: str, name: str) -> str:
    """A new name of what stands beside a checkpoint of this name."""
    return f"{mark}{name}-{token()}"


def target_of(name: str) -> str:
    """The name of the checkpoint that a directory was staged for, replaced by or deleted as; empty for other names."""
    match = _BESIDE.fullmatch(name)
    return match[1] if match else ""


def read_of(name: str) -> str:
    """The name of the checkpoint beside it that somebody reads, as a file's name says; empty for other names."""
    match = _READING.fullmatch(name)
    return match[1] if match else ""
