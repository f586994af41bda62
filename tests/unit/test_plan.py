# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""The plan of one parameter: literal tables of slices, layout by layout."""

import pytest

from mbridge_fsdp_ckpt.errors import LayoutError
from mbridge_fsdp_ckpt.families import Claim, Segment
from mbridge_fsdp_ckpt.plan.boxes import Box, FlatRange, Shape, whole
from mbridge_fsdp_ckpt.plan.layout import Axis, ParameterLayout
from mbridge_fsdp_ckpt.plan.slices import Component, Slice, owner, plan_parameter

KEY = "module.decoder.weight"
GATED = (("_w", 4), ("_v", 4))
SMALL_GATED = (("_w", 2), ("_v", 2))
INTERLEAVED = (("_w", 2), ("_v", 2), ("_w", 2), ("_v", 2))
GDN = ((".query", 2), (".key", 2), (".value", 3), (".z", 3), (".beta", 1), (".alpha", 1))
CONV = ((".query", 2), (".key", 2), (".value", 2))

Rows = tuple[tuple[str, int], ...]
PieceRow = tuple[str, Shape, Shape, int, int]


def layout(
    shape: Shape,
    flat: tuple[int, int],
    dim: int | None = None,
    tensor_parallel: tuple[int, int] = (0, 1),
    replica: tuple[int, int] = (0, 1),
    key: str = KEY,
) -> ParameterLayout:
    return ParameterLayout(key, f"module.{key}", shape, dim, Axis(*tensor_parallel), FlatRange(*flat), Axis(*replica))


def claim(rows: Rows) -> Claim | None:
    return Claim("family", 1, tuple(Segment(*row) for row in rows)) if rows else None


@pytest.mark.parametrize(
    ("of", "rows", "components", "slices"),
    [
        pytest.param(layout((6,), (2, 5)), (), {"": (6,)}, [("", (2,), (3,), 0, 3)], id="a bias, not fused"),
        pytest.param(layout((), (0, 1)), (), {"": ()}, [("", (), (), 0, 1)], id="a scalar"),
        pytest.param(layout((4, 3), (0, 0)), (), {"": (4, 3)}, [], id="an empty shard"),
        pytest.param(layout((8, 3), (24, 24)), GATED, {"_w": (4, 3), "_v": (4, 3)}, [], id="an empty shard, fused"),
        pytest.param(
            layout((0, 3), (0, 0)), (), {"": (0, 3)}, [("", (0, 0), (0, 3), 0, 0)], id="a parameter without elements"
        ),
        pytest.param(
            layout((4, 3), (3, 9), 0, (1, 2)), (), {"": (8, 3)}, [("", (5, 0), (2, 3), 0, 6)], id="column parallel"
        ),
        pytest.param(
            layout((4, 3), (3, 12), 1, (1, 2)), (), {"": (4, 6)}, [("", (1, 3), (3, 3), 0, 9)], id="row parallel"
        ),
        pytest.param(
            layout((4, 3), (2, 4), 1, (1, 2)),
            (),
            {"": (4, 6)},
            [("", (0, 5), (1, 1), 0, 1), ("", (1, 3), (1, 1), 1, 2)],
            id="row parallel, cut inside rows",
        ),
        pytest.param(
            layout((4, 3), (3, 9), None, (1, 2), (1, 2)),
            (),
            {"": (4, 3)},
            [("", (1, 0), (2, 3), 0, 6)],
            id="the same on all tensor-parallel ranks",
        ),
        pytest.param(
            layout((8, 3), (6, 18)),
            GATED,
            {"_w": (4, 3), "_v": (4, 3)},
            [("_w", (2, 0), (2, 3), 0, 6), ("_v", (0, 0), (2, 3), 6, 12)],
            id="SwiGLU, TP 1, across both halves",
        ),
        pytest.param(
            layout((8, 3), (12, 18)),
            GATED,
            {"_w": (4, 3), "_v": (4, 3)},
            [("_v", (0, 0), (2, 3), 0, 6)],
            id="SwiGLU, TP 1, one half only",
        ),
        pytest.param(
            layout((8, 3), (6, 18), 0, (1, 2)),
            GATED,
            {"_w": (8, 3), "_v": (8, 3)},
            [("_w", (6, 0), (2, 3), 0, 6), ("_v", (4, 0), (2, 3), 6, 12)],
            id="SwiGLU, TP 2",
        ),
        pytest.param(
            layout((4, 3), (4, 8), 0, (1, 2)),
            SMALL_GATED,
            {"_w": (4, 3), "_v": (4, 3)},
            [("_w", (3, 1), (1, 2), 0, 2), ("_v", (2, 0), (1, 2), 2, 4)],
            id="SwiGLU, TP 2, cut inside rows of both halves",
        ),
        pytest.param(
            layout((4,), (1, 3), 0, (0, 2)),
            SMALL_GATED,
            {"_w": (4,), "_v": (4,)},
            [("_w", (1,), (1,), 0, 1), ("_v", (0,), (1,), 1, 2)],
            id="SwiGLU bias",
        ),
        pytest.param(
            layout((8, 2), (0, 16)),
            INTERLEAVED,
            {"_w": (4, 2), "_v": (4, 2)},
            [
                ("_w", (0, 0), (2, 2), 0, 4),
                ("_v", (0, 0), (2, 2), 4, 8),
                ("_w", (2, 0), (2, 2), 8, 12),
                ("_v", (2, 0), (2, 2), 12, 16),
            ],
            id="interleaved",
        ),
        pytest.param(
            layout((8, 2), (6, 12), 0, (1, 2)),
            INTERLEAVED,
            {"_w": (8, 2), "_v": (8, 2)},
            [("_v", (5, 0), (1, 2), 0, 2), ("_w", (6, 0), (2, 2), 2, 6)],
            id="interleaved, TP 2, a slice",
        ),
        pytest.param(
            layout((12, 2), (0, 24), 0, (1, 2)),
            GDN,
            {".query": (4, 2), ".key": (4, 2), ".value": (6, 2), ".z": (6, 2), ".beta": (2, 2), ".alpha": (2, 2)},
            [
                (".query", (2, 0), (2, 2), 0, 4),
                (".key", (2, 0), (2, 2), 4, 8),
                (".value", (3, 0), (3, 2), 8, 14),
                (".z", (3, 0), (3, 2), 14, 20),
                (".beta", (1, 0), (1, 2), 20, 22),
                (".alpha", (1, 0), (1, 2), 22, 24),
            ],
            id="Gated DeltaNet in_proj, TP 2",
        ),
        pytest.param(
            layout((6, 1, 4), (4, 16)),
            CONV,
            {".query": (2, 1, 4), ".key": (2, 1, 4), ".value": (2, 1, 4)},
            [(".query", (1, 0, 0), (1, 1, 4), 0, 4), (".key", (0, 0, 0), (2, 1, 4), 4, 12)],
            id="Gated DeltaNet conv1d, three dimensions",
        ),
    ],
)
def test_components_and_pieces(
    of: ParameterLayout, rows: Rows, components: dict[str, Shape], slices: list[PieceRow]
) -> None:
    plan = plan_parameter(of, claim(rows))
    assert plan.components == tuple(Component(*item) for item in components.items())
    assert [
        (p.component.suffix, p.box.offset, p.box.size, p.source.start, p.source.stop) for p in plan.slices
    ] == slices
    assert plan.layout is of


def test_a_replica_holds_the_same_pieces_and_one_of_them_writes() -> None:
    plans = [plan_parameter(layout((8, 3), (6, 18), replica=(r, 4)), claim(GATED)) for r in range(4)]
    assert len({tuple((p.component, p.box, p.source) for p in plan.slices) for plan in plans}) == 1
    for number in range(2):
        assert sum(plan.slices[number].writes for plan in plans) == 1


@pytest.mark.parametrize(("replicas", "writer"), [(1, 0), (3, 2), (7, 5)])
def test_the_writing_replica_follows_from_the_key_alone(replicas: int, writer: int) -> None:
    """The CRC-32 of the digits 1 to 9 is 0xCBF43926, its published check value: no process's hash seed is in it."""
    assert 0xCBF43926 % replicas == writer
    assert owner("123456789", replicas) == writer


def test_writers_are_spread_over_the_replicas() -> None:
    writers = [owner(f"module.layers.{n}.weight", 4) for n in range(200)]
    assert all(25 <= writers.count(replica) <= 75 for replica in range(4))


def test_keys_are_those_of_the_stock_format() -> None:
    of = ParameterLayout(
        "module.layers.0.fc1.weight",
        "module.module.module.layers.0.fc1.weight",
        (8, 3),
        None,
        Axis(0, 1),
        FlatRange(0, 24),
        Axis(0, 1),
    )
    plan = plan_parameter(of, claim(GATED))
    gate, up = plan.components
    assert plan.model_key(gate) == "model.module.layers.0.fc1.weight_w"
    assert plan.slot_key(up, "exp_avg") == "optimizer.state.module.module.module.layers.0.fc1.weight_v.exp_avg"


@pytest.mark.parametrize(
    ("box", "is_origin"),
    [
        (Box((0, 0), (1, 1)), True),
        (Box((0, 1), (1, 1)), False),
        (Box((1, 0), (1, 1)), False),
        (Box((0, 0), (0, 3)), False),
        (Box((), ()), True),
    ],
)
def test_the_origin_is_the_piece_with_the_first_element(box: Box, is_origin: bool) -> None:
    component = Component("", (4, 4))
    slice_ = Slice(component, box, FlatRange(0, box.volume), box.size, whole(box.size), Axis(0, 1), True)
    assert slice_.is_origin is is_origin


def test_a_component_may_go_by_another_modules_name() -> None:
    parts = Claim("family", 1, (Segment("", 2, module="q_proj"), Segment("", 4, module="kv_proj")))
    plan = plan_parameter(layout((6, 2), (0, 12), key="attention.qkv_proj.weight"), parts)
    assert [plan.model_key(c) for c in plan.components] == [
        "model.attention.q_proj.weight",
        "model.attention.kv_proj.weight",
    ]
    assert [c.global_shape for c in plan.components] == [(2, 2), (4, 2)]


def test_a_later_stages_copy_is_not_written() -> None:
    of = ParameterLayout(KEY, KEY, (4, 3), None, Axis(0, 1), FlatRange(0, 12), Axis(0, 1), is_copy=True)
    (slice_,) = plan_parameter(of, None).slices
    assert slice_.is_origin
    assert not slice_.writes


@pytest.mark.parametrize(
    ("shape", "flat", "dim"), [((4, 3), (0, 13), None), ((4, 3), (0, 3), 2), ((), (0, 1), 0), ((4,), (0, 4), -1)]
)
def test_a_layout_that_contradicts_itself_is_refused(shape: Shape, flat: tuple[int, int], dim: int | None) -> None:
    with pytest.raises(LayoutError) as caught:
        layout(shape, flat, dim)
    assert caught.value.key == KEY


@pytest.mark.parametrize(("index", "count"), [(1, 1), (-1, 2), (0, 0)])
def test_a_place_outside_its_axis_is_refused(index: int, count: int) -> None:
    with pytest.raises(ValueError, match="axis"):
        Axis(index, count)
