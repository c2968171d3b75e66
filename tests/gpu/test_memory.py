"""Guards, poison and isolation where the memory is a GPU's."""

from __future__ import annotations

import subprocess
import sys
import warnings
from dataclasses import astuple
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.gpu

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")

from pytest_fusion.case.layouts import Geometry  # noqa: E402
from pytest_fusion.run.memory import FILLS, Arena, Change, Damage, Watch  # noqa: E402 - after the skip
from pytest_fusion.run.memory.backing import DEVICE_GUARD_BYTES  # noqa: E402

ROOT = Path(__file__).parents[2]

# name -> shape, strides, offset, storage_elements
LAYOUTS: dict[str, tuple[tuple[int, ...], tuple[int, ...], int, int]] = {
    "contiguous": ((3, 5), (5, 1), 0, 15),
    "step": ((3, 5), (10, 2), 0, 30),
    "padded": ((3, 5), (8, 1), 2, 26),
    "expanded": ((3, 5), (0, 2), 1, 11),
    "overlapping": ((3, 4), (2, 1), 1, 10),
    "no rows": ((0, 5), (5, 1), 2, 6),
}


@triton.jit
def poke(pointer, element, value):
    tl.store(pointer + element, value)


@triton.jit
def copy(source, target, n, BLOCK: tl.constexpr, MASKED: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if MASKED:
        tl.store(target + i, tl.load(source + i, mask=i < n), mask=i < n)
    else:
        tl.store(target + i, tl.load(source + i))


def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def make(arena: Arena, layout: str, dtype: torch.dtype = torch.float32, name: str = "x") -> torch.Tensor:
    shape, strides, offset, storage = LAYOUTS[layout]
    return arena.tensor(name, Geometry(shape, strides, offset, storage), dtype)


def whole(x: torch.Tensor) -> torch.Tensor:
    """The storage of ``x`` from its first byte, whose ``data_ptr`` is never null."""
    return torch.empty(0, dtype=x.dtype, device=x.device).set_(x.untyped_storage())


def own_elements(layout: str) -> set[int]:
    shape, strides, offset, _ = LAYOUTS[layout]
    reached = {offset}
    for size, stride in zip(shape, strides, strict=True):
        reached = {r + i * stride for r in reached for i in range(size)}
    return reached


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_is_exact(layout: str, dtype: torch.dtype) -> None:
    """On the GPU, too, the storage is exact, aligned and no view."""
    shape, strides, offset, storage = LAYOUTS[layout]
    x = make(Arena(device(), "nan"), layout, dtype)

    assert (x.shape, x.stride(), x.storage_offset(), x.device) == (shape, strides, offset, device())
    assert x.untyped_storage().nbytes() == storage * dtype.itemsize
    assert x.untyped_storage().data_ptr() % 256 == 0
    assert not x._is_view()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_other_element_is_guarded(layout: str) -> None:
    """A kernel's store to any element near the tensor that is not its own is found, with its side and distance."""
    own, (_, _, offset, storage) = own_elements(layout), LAYOUTS[layout]
    low, high = (min(own), max(own)) if own else (offset, offset - 1)
    guard = DEVICE_GUARD_BYTES // 4
    for element in sorted({-guard, *range(-2, storage + 2), storage + guard - 1}):
        arena = Arena(device(), "nan")
        x = make(arena, layout)
        arena.snapshot()
        poke[(1,)](whole(x), element, 1.0)

        if element in own:
            assert arena.damage() == []
            assert [change.name for change in arena.changed()] == ["x"]
            continue
        zone = "before" if element < low else "after" if element > high else "between"
        distance = {"before": low - element, "after": element - high}.get(zone)
        expected = min(abs(element - o) for o in own) if distance is None else distance
        (found,) = arena.damage()
        assert (found.zone, found.elements) == (zone, expected)
        assert 1 <= found.count <= 4
        assert arena.changed() == []


@pytest.mark.parametrize("layout", ["contiguous", "padded", "expanded", "overlapping"])
def test_snapshot_and_refill(layout: str) -> None:
    """Another fill keeps values and addresses; one changed bit of an own element is reported with its index."""
    arena = Arena(device(), "nan")
    x = make(arena, layout)
    for element in own_elements(layout):
        poke[(1,)](whole(x), element, float(element))
    kept, address = x.clone(), x.data_ptr()
    arena.snapshot()
    arena.refill("huge")

    assert torch.equal(x, kept)
    assert (arena.damage(), arena.changed(), x.data_ptr()) == ([], [], address)
    poke[(1,)](whole(x), LAYOUTS[layout][2], -1.0)
    assert arena.changed() == [Change("x", 1, tuple(0 for _ in x.shape))]


def test_clean_check_waits_once() -> None:
    """Checking many undamaged tensors transfers one answer from the device, not one per tensor."""
    arena = Arena(device(), "nan")
    for layout in LAYOUTS:
        make(arena, layout)
    arena.snapshot()
    torch.cuda.synchronize()
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")  # itself warns that it is a prototype
            assert arena.damage() == []
            assert arena.changed() == []
            arena.refill("huge")
    finally:
        torch.cuda.set_sync_debug_mode("default")

    assert len([w for w in caught if "called a synchronizing" in str(w.message)]) == 2


@pytest.mark.parametrize("fill", FILLS)
@pytest.mark.parametrize("masked", [True, False])
def test_copy_without_a_mask(fill: str, masked: bool) -> None:
    """A copy kernel without its tail mask is found out under either fill, although what it writes is itself a guard."""
    arena = Arena(device(), fill)
    x = arena.tensor("x", Geometry((100,), (1,), 0, 100), torch.bfloat16)
    x.normal_()
    arena.snapshot()
    with Watch(device(), fill) as watch:
        out = torch.empty_like(x)
        copy[(1,)](x, out, 100, BLOCK=256, MASKED=masked)

    assert torch.equal(out, x)
    assert (arena.damage(), arena.changed()) == ([], [])
    assert [(d.zone, d.elements) for d in watch.damage()] == ([] if masked else [("after", 1)])
    assert not watch.unwritten(out).any()


def test_unwritten_elements() -> None:
    """Elements that no program wrote hold each fill in turn."""
    x = torch.ones(100, device=device())
    masks = []
    for fill in FILLS:
        with Watch(device(), fill) as watch:
            out = torch.empty_like(x)
            copy[(1,)](x, out, 90, BLOCK=128, MASKED=True)
        masks.append(watch.unwritten(out))

    assert (masks[0] & masks[1]).nonzero().flatten().tolist() == list(range(90, 100))


def test_backward_on_the_engines_thread() -> None:
    """Allocations in a backward that runs on autograd's device thread are watched."""
    made: list[torch.Tensor] = []

    class Scale(torch.autograd.Function):
        @staticmethod
        def forward(_: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(_: Any, grad: torch.Tensor) -> torch.Tensor:
            made.append(torch.empty(grad.shape, device=grad.device))
            return made[0].copy_(grad)

    x = torch.ones(5, device=device(), requires_grad=True)
    with Watch(device(), "nan") as watch:
        Scale.apply(x).sum().backward()

    assert watch.unwritten(made[0]) is not None
    poke[(1,)](made[0], 5, 1.0)
    assert [(d.zone, d.elements) for d in watch.damage()] == [("after", 1)]


def test_triton_operators_are_watched_inside() -> None:
    """Allocations in a torch.library.triton_op are seen."""
    made: list[torch.Tensor] = []

    @torch.library.triton_op("fusion_gpu_test::copy", mutates_args=())
    def op(x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        made.append(out)
        torch.library.wrap_triton(copy)[(1,)](x, out, x.numel(), BLOCK=128, MASKED=True)
        return out

    x = torch.randn(100, device=device())
    with Watch(device(), "nan") as watch:
        out = op(x)

    assert torch.equal(out, x)
    assert watch.unwritten(made[-1]) is not None


def test_other_devices_are_left_alone() -> None:
    """A watch on the GPU leaves CPU and pinned memory alone."""
    with Watch(device(), "nan") as watch:
        torch.empty(5)
        torch.empty(5, pin_memory=True)
        torch.zeros(5, device=device()).cpu()

    assert watch.allocations == 1


def test_graph_capture() -> None:
    """Under CUDA graph capture nothing is guarded and the graph replays."""
    x = torch.ones(100, device=device())
    graph = torch.cuda.CUDAGraph()
    with Watch(device(), "nan") as watch, torch.cuda.graph(graph):
        before = watch.allocations  # torch itself allocates on the way into a capture
        out = torch.empty_like(x)
        out.copy_(x).add_(1)
        after = watch.allocations
    x.fill_(4)
    graph.replay()

    assert after == before
    assert torch.equal(out, torch.full_like(x, 5))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, while it imports its compiler
def test_compiled_candidates_stay_compiled() -> None:
    """Inductor code compiled inside a watch is used inside and outside one, and compiled once."""
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()

    @torch.compile
    def kernel(x: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(x).copy_(x) + 1

    x = torch.randn(100, device=device())
    for fill in FILLS:
        with Watch(device(), fill) as watch:
            out = kernel(x)
        assert torch.equal(out, x + 1)
        assert watch.damage() == []
        assert torch.equal(kernel(x), x + 1)

    assert counters["stats"]["unique_graphs"] == 1


def test_memory_does_not_grow() -> None:
    """A hundred cases leave no device memory behind."""

    def case() -> None:
        arena = Arena(device(), "nan")
        for layout in LAYOUTS:
            make(arena, layout)
        arena.snapshot()
        with Watch(device(), "nan") as watch:
            torch.empty(1000, device=device())
        arena.refill("huge")
        assert arena.damage() == watch.damage() == []

    case()
    before = torch.cuda.memory_allocated()
    for _ in range(100):
        case()

    assert torch.cuda.memory_allocated() == before


def run_program(program: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


POISON = """
import torch
from pytest_fusion.run.process.fork import can_fork, cuda_is_poisoned

assert can_fork() is None and cuda_is_poisoned() is False and not torch.cuda.is_initialized()
x = torch.zeros(10, device="cuda")
assert "CUDA" in can_fork()
assert cuda_is_poisoned() is False
try:
    torch.empty(1 << 60, dtype=torch.uint8, device="cuda")
except RuntimeError:
    pass
assert cuda_is_poisoned() is False
try:
    x[torch.full((1,), 1 << 20, device="cuda")] = 1.0
    torch.cuda.synchronize()
except RuntimeError as error:
    print(type(error).__name__)
assert cuda_is_poisoned() is True
assert cuda_is_poisoned() is True
print("told apart")
"""


def test_poisoned_context() -> None:
    """A device assert poisons the process, running out of memory does not, and asking never starts CUDA."""
    assert run_program(POISON).endswith("told apart\n")


FORKED_BACKWARD = """
import torch
from pytest_fusion.run.process.fork import can_fork, run_isolated

def backward(channel=None):
    x = torch.ones(300, 300, requires_grad=True)
    (x @ x).sum().backward()
    return float(x.grad[0, 0])

assert backward() == 600.0
reason = can_fork()
print(reason)
if reason is None:
    assert run_isolated(backward, time_limit_s=60) == 600.0
print("done")
"""


def test_forking_after_cpu_backward() -> None:
    """After a CPU backward in a process that could use CUDA, either can_fork says no or the child's backward works."""
    assert run_program(FORKED_BACKWARD).endswith("done\n")


CUDA_IN_CHILD = """
import torch
from pytest_fusion.run.process.fork import Crash, run_isolated

def work(channel):
    x = torch.zeros(10, device="cuda")
    channel.note("before")
    x[torch.full((1,), 1 << 20, device="cuda")] = 1.0
    torch.cuda.synchronize()

outcome = run_isolated(work, time_limit_s=120)
assert not torch.cuda.is_initialized()
print(torch.ones(3, device="cuda").sum().item())
"""


def test_cuda_in_a_child_does_not_touch_the_parent() -> None:
    """A device assert in a child of a process that has not started CUDA leaves the parent's CUDA usable."""
    assert run_program(CUDA_IN_CHILD).endswith("3.0\n")


def test_damage_is_plain_data() -> None:
    """What is found holds no tensor, so that it can outlive the device memory."""
    arena = Arena(device(), "nan")
    x = make(arena, "contiguous")
    poke[(1,)](x, 15, 1.0)

    (found,) = arena.damage()
    assert found == Damage("x", "after", 1, 1, found.count)
    assert [type(v) for v in astuple(found)] == [str, str, int, int, int]
