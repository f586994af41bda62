# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Reading tensors of a `torch_dist` checkpoint under this format's keys.

The directory is one of torch's Distributed Checkpoint, as stock `fsdp_dtensor`'s is: metadata goes through the
restricted unpickler, tensors and values through `weights_only`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from mbridge_fsdp_ckpt.dcp.reader import DcpSource
from mbridge_fsdp_ckpt.format.kinds import DirectoryKind
from mbridge_fsdp_ckpt.format.source import StoredChunk
from mbridge_fsdp_ckpt.plan.boxes import Box, Shape
from mbridge_fsdp_ckpt.tools.convert.torch_dist.links import Link

_NOWHERE = Box((), ())
TORCH_DIST = str(DirectoryKind.TORCH_DIST)
"""Files that only `torch_dist` has; older releases kept non-tensor state in the second."""


@dataclass(frozen=True, slots=True)
class _Piece(StoredChunk):
    """A block of this format's key, out of a chunk of the other's.

    Args:
        whole: The chunk.
        block: What to take of it, in the other's key.
    """

    whole: StoredChunk | None = None
    block: Box = field(default=_NOWHERE)


class LinkedChunks:
    """Where keys lie, by links into another checkpoint.

    Args:
        source: The checkpoint.
        links: For each key, its blocks there.
    """

    def __init__(self, source: DcpSource, links: Mapping[str, Sequence[Link]]) -> None:
        self._source, self._links = source, links
        self._known: dict[tuple[str, int], dict[Shape, list[StoredChunk]]] = {}

    def chunks(self, keys: Iterable[str]) -> dict[str, list[StoredChunk]]:
        """See `CheckpointSource`."""
        return {key: [piece for link in self._links[key] for piece in self._pieces(key, link)] for key in keys}

    def read(self, chunk: StoredChunk, *, verify: bool = True) -> torch.Tensor:
        """See `CheckpointSource`; there is nothing to verify bytes against."""
        assert isinstance(chunk, _Piece)
        assert chunk.whole is not None
        elements = self._source.read(chunk.whole)
        return elements[chunk.block.slices_in(chunk.whole.box)].reshape(chunk.box.size).contiguous()

    def _pieces(self, key: str, link: Link) -> Iterator[_Piece]:
        lead = len(link.there.offset) - len(link.here.offset)
        by_lead = self._by_lead(link.key, lead)
        found = by_lead.get(link.there.offset[:lead], ())
        for stored in (*found, *by_lead.get((), ())) if lead else found:
            common = stored.box.intersect(link.there) if link.there.size else stored.box
            if common is not None:
                begin = zip(common.offset[lead:], link.there.offset[lead:], link.here.offset, strict=True)
                box = Box(tuple(o - base + new for o, base, new in begin), common.size[lead:])
                place = stored.path, stored.record, stored.checksum
                yield _Piece(key, box, *place, whole=stored, block=common)

    def _by_lead(self, key: str, lead: int) -> Mapping[Shape, list[StoredChunk]]:
        """A key's chunks by where they begin in its leading dimensions; under () those that span some there."""
        if (key, lead) not in self._known:
            found: dict[Shape, list[StoredChunk]] = defaultdict(list)
            for chunk in self._source.chunks([key])[key]:
                thin = all(size == 1 for size in chunk.box.size[:lead])
                found[chunk.box.offset[:lead] if thin else ()].append(chunk)
            self._known[key, lead] = found
        return self._known[key, lead]
