# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Which ranks hold the same of a tensor, by the device meshes of a model's DTensors; no rank is asked.

A DTensor's mesh need not have all ranks that hold its model.  Under tensor parallelism a norm's weight is often a
DTensor of the data-parallel dimension alone, and the same on all tensor-parallel ranks.  So all meshes of a model
are looked at: the dimensions of their root along which any of its tensors is distributed are those of the model, and
along those of them that a tensor's own mesh lacks, it is replicated.  Stages of a pipeline share a root as well, but no
tensor is distributed along that dimension.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from mbridge_fsdp_ckpt.live.readers.protocol import Ranks
from mbridge_fsdp_ckpt.plan.layout import Axis

_Array = npt.NDArray[np.int64]


class Holders:
    """The ranks that hold a model.

    Args:
        meshes: Of its DTensors.
    """

    def __init__(self, meshes: Iterable[DeviceMesh]) -> None:
        self._meshes = list({id(mesh): mesh for mesh in meshes}.values())
        self._along: dict[tuple[Any, ...], set[int]] = {}
        self._known: dict[tuple[int, tuple[int, ...]], Ranks] = {}
        for mesh in self._meshes:
            root = mesh._get_root_mesh()
            self._along.setdefault(_kind(root), set()).update(_dimensions_in(mesh, root))

    def of(self, mesh: DeviceMesh, replicated: Sequence[int]) -> Ranks:
        """Those that hold the same of a DTensor as this one, which is among them.

        Args:
            mesh: Its mesh, one of the model's.
            replicated: The dimensions of the mesh along which it is replicated.
        """
        kind = id(mesh), tuple(replicated)
        if kind not in self._known:
            own = _ranks(mesh)[_through(mesh, replicated)].reshape(-1)
            root = mesh._get_root_mesh()
            beyond = self._along[_kind(root)] - _dimensions_in(mesh, root)
            self._known[kind] = _spread(own, root, beyond)
        return self._known[kind]

    @cached_property
    def all(self) -> Ranks:
        """Those that hold the model: what is no DTensor is whole on each of them."""
        roots = [mesh._get_root_mesh() for mesh in self._meshes]
        if not roots:
            return tuple(range(dist.get_world_size())) if dist.is_initialized() else (0,)
        me = np.array([dist.get_rank()])
        return max((_spread(me, root, self._along[_kind(root)]) for root in roots), key=len)


def place_among(ranks: Ranks) -> Axis:
    """This rank's place among some that hold the same."""
    return Axis(ranks.index(dist.get_rank() if dist.is_initialized() else 0), len(ranks))


def _kind(mesh: DeviceMesh) -> tuple[Any, ...]:
    """What a mesh lays out how: torch keeps equal ones for DTensors that it makes, of models that were there before."""
    ranks = _ranks(mesh)
    return ranks.shape, ranks.tobytes()


def _ranks(mesh: DeviceMesh) -> _Array:
    return np.array(mesh.mesh.tolist(), dtype=np.int64)


def _through(mesh: DeviceMesh, free: Iterable[int]) -> tuple[Any, ...]:
    """The index of all ranks at this rank's place, but along some dimensions."""
    place = mesh.get_coordinate()
    assert place is not None  # this rank holds a tensor on it
    return tuple(slice(None) if dim in set(free) else at for dim, at in enumerate(place))


def _dimensions_in(mesh: DeviceMesh, root: DeviceMesh) -> set[int]:
    """The dimensions of the root along which the ranks of a mesh lie: one of the mesh may be several of them."""
    everywhere, found = _ranks(root), np.isin(_ranks(root), _ranks(mesh))
    places = np.argwhere(found)
    return {dim for dim in range(everywhere.ndim) if len(set(places[:, dim].tolist())) > 1}


def _spread(ranks: _Array, root: DeviceMesh, along: set[int]) -> Ranks:
    """Some ranks, and all at the places of them but along some dimensions of the root."""
    everywhere = _ranks(root)
    if not along:
        return tuple(sorted(ranks.tolist()))
    found = set[int]()
    for place in np.argwhere(np.isin(everywhere, ranks)).tolist():
        index = tuple(slice(None) if dim in along else at for dim, at in enumerate(place))
        found.update(everywhere[index].reshape(-1).tolist())
    return tuple(sorted(found))
