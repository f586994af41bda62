# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Seconds of a save and of loads, predicted from what ranks write and read and from what the machines can do."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mbridge_fsdp_ckpt.tools.estimate.costs import (
    AROUND,
    MEETINGS,
    REQUESTS,
    Bandwidths,
    IndexBytes,
    files_of,
    index_bytes,
)
from mbridge_fsdp_ckpt.tools.estimate.elsewhere import read_over_held
from mbridge_fsdp_ckpt.tools.estimate.estimate import Estimate
from mbridge_fsdp_ckpt.tools.estimate.layout import JobLayout


@dataclass(frozen=True, slots=True)
class LoadElsewhere:
    """A load in another layout.

    Args:
        layout: That layout.
        read_over_held: Bytes that a rank reads over those of what it holds, of its planned ranks.
        seconds: What the load takes.
    """

    layout: JobLayout
    read_over_held: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a job's checkpoints cost.

    Args:
        rates: What the machines can do.
        files: Files of a checkpoint.
        index: Bytes of those of them that are index files.
        requests: To the rendezvous store, of all ranks in a save.
        save: Seconds of the first save.
        later_save: Seconds of a later one.
        load: Seconds of a load in the same layout.
        elsewhere: A load in another one.
    """

    rates: Bandwidths
    files: int
    index: IndexBytes
    requests: int
    save: float
    later_save: float
    load: float
    elsewhere: LoadElsewhere | None


def predict(found: Estimate, rates: Bandwidths, other: Estimate | None) -> Prediction:
    """Predict what an estimated job's checkpoints cost.

    Args:
        found: The job.
        rates: What the machines can do.
        other: A job of the same model in another layout, which loads what this one saved.
    """
    tally, (first, later), index = found.tally, found.planning, index_of(found)
    own = index.own // found.layout.world
    writing = rates.write_seconds(tally.bytes + own)
    return Prediction(
        rates=rates,
        files=files_of(tally),
        index=index,
        requests=(MEETINGS * REQUESTS + AROUND) * found.layout.world,
        save=writing + first,
        later_save=writing + later,
        load=rates.read_seconds(tally.held_bytes + own) + first,
        elsewhere=None if other is None else _elsewhere(found, rates, other, index),
    )


def index_of(found: Estimate) -> IndexBytes:
    """Bytes of the index of an estimated job."""
    return index_bytes(found.tally, found.subjects[0].slots)


def _elsewhere(found: Estimate, rates: Bandwidths, other: Estimate, index: IndexBytes) -> LoadElsewhere:
    ratio, a_rank = read_over_held(found, other), index.directories
    read = (other.tally.held_bytes * ratio).astype(np.int64) + a_rank
    seconds = rates.read_seconds(read) + other.planning[0]
    return LoadElsewhere(other.layout, ratio, seconds)
