"""The arena: what it hands out, and that every byte written outside a tensor's own elements is seen."""

from __future__ import annotations

import ctypes
import gc
import mmap
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_fusion.case.layouts import Geometry
from pytest_fusion.run.memory import Arena, Change, Damage
from pytest_fusion.run.memory.backing import SLACK_BYTES

CPU = torch.device("cpu")

# name -> shape, strides, offset, storage_elements
LAYOUTS: dict[str, tuple[tuple[int, ...], tuple[int, ...], int, int]] = {
    "contiguous": ((3, 5), (5, 1), 0, 15),
    "transposed": ((3, 5), (1, 3), 0, 15),
    "step": ((3, 5), (10, 2), 0, 30),
    "padded": ((3, 5), (8, 1), 0, 24),
    "unflattenable": ((2, 3, 4), (16, 4, 1), 0, 32),
    "expanded": ((3, 5), (0, 1), 0, 5),
    "expanded inside": ((3, 5), (0, 2), 1, 11),
    "offset": ((3, 5), (5, 1), 3, 18),
    "overlapping": ((3, 4), (2, 1), 1, 10),
    "scalar": ((), (), 0, 1),
    "one": ((1, 1), (77, 13), 2, 3),
    "no rows": ((0, 5), (5, 1), 0, 0),
    "no rows, offset": ((0, 5), (5, 1), 2, 6),
}
DTYPES = [
    torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.float8_e4m3fn, torch.bool, torch.int8,
    torch.int64, torch.complex64, torch.complex128,
]  # fmt: skip


def make(arena: Arena, layout: str, dtype: torch.dtype = torch.float32, name: str = "x") -> torch.Tensor:
    shape, strides, offset, storage = LAYOUTS[layout]
    return arena.tensor(name, Geometry(shape, strides, offset, storage), dtype)


def flip(address: int) -> None:
    """What a stray store does to one byte."""
    byte = ctypes.c_uint8.from_address(address)
    byte.value ^= 0xFF


def own_elements(layout: str) -> set[int]:
    shape, strides, offset, _ = LAYOUTS[layout]
    reached = {offset}
    for size, stride in zip(shape, strides, strict=True):
        reached = {r + i * stride for r in reached for i in range(size)}
    return reached


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_is_exact(layout: str, dtype: torch.dtype) -> None:
    """The tensor has the layout asked for, on an aligned storage of exactly the size asked for, and is no view."""
    shape, strides, offset, storage = LAYOUTS[layout]
    x = make(Arena(CPU, "nan"), layout, dtype)

    assert (x.shape, x.dtype) == (shape, dtype)
    assert x.untyped_storage().nbytes() == storage * dtype.itemsize
    assert x.untyped_storage().data_ptr() % 256 == 0  # 0 for a storage of nothing
    assert not x._is_view()
    assert (x.stride(), x.storage_offset()) == (strides, offset)


@pytest.mark.parametrize("fill", ["nan", "huge"])
def test_everything_holds_the_fill(fill: str) -> None:
    """Own elements, gaps and both guards hold the fill before anything is written."""
    x = make(Arena(CPU, fill), "padded")
    before = (ctypes.c_float * (LAYOUTS["padded"][3] + 2 * 256)).from_address(x.untyped_storage().data_ptr() - 1024)
    seen = torch.tensor(list(before))

    assert seen.isnan().all() if fill == "nan" else (seen > 9e29).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_own_elements_are_free_to_change(layout: str, dtype: torch.dtype) -> None:
    """Writing every own element is no damage, whatever the layout."""
    arena = Arena(CPU, "nan")
    x = make(arena, layout, dtype)
    if layout != "overlapping":
        compact = x
        for axis, stride in enumerate(x.stride()):
            compact = compact.narrow(axis, 0, 1) if stride == 0 and x.shape[axis] > 1 else compact
        compact.fill_(1)
    for i in own_elements(layout) if x.numel() else ():
        flip(x.untyped_storage().data_ptr() + i * dtype.itemsize)

    assert arena.damage() == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8, torch.complex128], ids=str)
@pytest.mark.parametrize("layout", [name for name in LAYOUTS if 0 not in LAYOUTS[name][0]])
def test_every_other_byte_is_guarded(layout: str, dtype: torch.dtype) -> None:
    """One changed byte in any element that is not the tensor's own is found, with its side and distance."""
    size, storage = dtype.itemsize, LAYOUTS[layout][3]
    own = own_elements(layout)
    for element in sorted({*range(-3, storage + 3)} - own):
        arena = Arena(CPU, "huge")
        x = make(arena, layout, dtype)
        flip(x.untyped_storage().data_ptr() + element * size + size // 2)

        zone = "before" if element < min(own) else "after" if element > max(own) else "between"
        distance = min(abs(element - o) for o in own)
        assert arena.damage() == [Damage("x", zone, distance, distance, 1)]


@pytest.mark.parametrize(
    ("element", "zone", "distance"), [(-1, "before", 3), (1, "before", 1), (2, "after", 1), (6, "after", 5)]
)
def test_empty_tensor_is_guarded(element: int, zone: str, distance: int) -> None:
    """Around a tensor without elements everything is guarded, its own storage included."""
    arena = Arena(CPU, "nan")
    x = make(arena, "no rows, offset")
    flip(x.untyped_storage().data_ptr() + 4 * element)

    assert arena.damage() == [Damage("x", zone, distance, distance, 1)]


def test_far_writes_are_found() -> None:
    """A store far beyond the guard damages nothing else and is reported with its distance."""
    arena = Arena(CPU, "nan")
    x, y = make(arena, "contiguous", name="x"), make(arena, "contiguous", name="y")
    start = x.untyped_storage().data_ptr()
    flip(start + 60 + SLACK_BYTES // 2)
    flip(start - SLACK_BYTES // 4)

    assert arena.damage() == [
        Damage("x", "before", SLACK_BYTES // 4 // 4, SLACK_BYTES // 4 // 4, 1),
        Damage("x", "after", SLACK_BYTES // 2 // 4 + 1, SLACK_BYTES // 2 // 4 + 1, 1),
    ]
    arena.refill("huge")
    assert arena.damage() == []
    assert y.isnan().all()


def test_damage_counts_bytes_and_keeps_both_ends() -> None:
    """Several changed elements of one zone are one damage: the nearest and the farthest distance, all bytes."""
    arena = Arena(CPU, "nan")
    x = make(arena, "contiguous")
    for element in (16, 20, 17):
        flip(x.untyped_storage().data_ptr() + 4 * element)

    assert arena.damage() == [Damage("x", "after", 2, 6, 3)]


def test_guards_of_two_tensors_differ() -> None:
    """A kernel that copies one tensor's guard into another's does not go unnoticed."""
    arena = Arena(CPU, "nan")
    x, y = make(arena, "contiguous", name="x"), make(arena, "contiguous", name="y")
    ctypes.memmove(y.untyped_storage().data_ptr(), x.untyped_storage().data_ptr(), 64)

    assert [(d.name, d.zone, d.elements) for d in arena.damage()] == [("y", "after", 1)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", ["contiguous", "padded", "expanded inside", "overlapping", "offset"])
def test_changed_bits_of_inputs(layout: str, dtype: torch.dtype) -> None:
    """A changed bit of an own element is reported with its index; unchanged NaNs and writes to gaps are not."""
    arena = Arena(CPU, "nan")
    x, _ = make(arena, layout, dtype), make(arena, layout, dtype, name="y")
    arena.snapshot()
    assert arena.changed() == []

    shape, strides, offset, _ = LAYOUTS[layout]
    last = offset + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
    flip(x.untyped_storage().data_ptr() + last * dtype.itemsize)

    found = arena.changed()
    index = tuple(0 if s == 0 else n - 1 for n, s in zip(shape, strides, strict=True))
    assert found == [Change("x", 1, index)]


def test_negative_zero_is_a_change() -> None:
    """Inputs are compared by bits: 0.0 made -0.0 is a write."""
    arena = Arena(CPU, "nan")
    x = make(arena, "contiguous").zero_()
    arena.snapshot()
    x[1, 2] = -0.0

    assert arena.changed() == [Change("x", 1, (1, 2))]


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if LAYOUTS[name][3]])
def test_refill(layout: str) -> None:
    """Another fill changes all surroundings and neither values nor addresses, and forgets earlier damage."""
    arena = Arena(CPU, "nan")
    x = make(arena, layout)
    for i in sorted(own_elements(layout)) if x.numel() else ():
        ctypes.c_float.from_address(x.untyped_storage().data_ptr() + 4 * i).value = float(i)
    flip(x.untyped_storage().data_ptr() - 5)
    address, kept = x.data_ptr(), x.clone()
    arena.snapshot()
    arena.refill("huge")

    assert (arena.damage(), arena.changed(), x.data_ptr()) == ([], [], address)
    assert torch.equal(x, kept)
    assert ctypes.c_float.from_address(x.untyped_storage().data_ptr() - 4).value > 9e29


def test_autograd_takes_the_tensors_as_leaves() -> None:
    """Arena tensors can require grad, be written in place and go through backward like a user's own."""
    x = make(Arena(CPU, "nan"), "padded")
    x.copy_(torch.ones(3, 5))
    x.requires_grad_()
    (2 * x).sum().backward()

    assert x.is_leaf
    assert torch.equal(x.grad, torch.full((3, 5), 2.0))


def test_layout_beyond_the_storage_is_refused() -> None:
    """A layout that reaches past its storage is an error with both numbers, not an out-of-bounds tensor."""
    with pytest.raises(ValueError, match="reach element 17, but the storage has 17"):
        Arena(CPU, "nan").tensor("x", Geometry((3, 5), (5, 1), 3, 17), torch.float32)


@st.composite
def layouts(draw: st.DrawFn) -> tuple[list[int], list[int], int, int]:
    shape = draw(st.lists(st.integers(1, 4), max_size=3))
    strides = [draw(st.integers(0, 9)) for _ in shape]
    offset = draw(st.integers(0, 3))
    reach = offset + 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
    return shape, strides, offset, reach + draw(st.integers(0, 3))


@settings(max_examples=60, deadline=None)
@given(layouts(), st.data())
def test_any_layout(layout: tuple[list[int], list[int], int, int], data: st.DataObject) -> None:
    """For any shape, strides and offset, one flipped byte is damage exactly when no own element holds it."""
    shape, strides, offset, storage = layout
    arena = Arena(CPU, data.draw(st.sampled_from(["nan", "huge"])))
    x = arena.tensor("x", Geometry(tuple(shape), tuple(strides), offset, storage), torch.int16)
    arena.snapshot()
    element = data.draw(st.integers(-2, storage + 1))
    flip(x.untyped_storage().data_ptr() + 2 * element)
    own = {offset}
    for size, stride in zip(shape, strides, strict=True):
        own = {r + i * stride for r in own for i in range(size)}

    assert bool(arena.damage()) == (element not in own)
    assert bool(arena.changed()) == (element in own)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")
def test_memory_does_not_grow() -> None:
    """A thousand arenas leave no memory behind once their tensors are gone."""

    def case() -> Any:
        arena = Arena(CPU, "nan")
        for layout in ("contiguous", "padded", "offset"):
            make(arena, layout)
        arena.snapshot()
        arena.refill("huge")
        return arena.damage()

    for _ in range(50):
        case()
    gc.collect()
    before = resident_bytes()
    for _ in range(1000):
        case()
    gc.collect()

    assert resident_bytes() - before < 4 * 2**20


def test_tensors_outlive_their_arena() -> None:
    """A tensor keeps its memory when the arena is gone."""
    x = make(Arena(CPU, "nan"), "contiguous")
    gc.collect()
    x.fill_(3)

    assert x.sum().item() == 45
