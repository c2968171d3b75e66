"""The watch: which allocations it sees, what it makes of them, and that it never gets in a candidate's way."""

from __future__ import annotations

import ctypes
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, empty_like
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from pytest_fusion.case.layouts import Geometry
from pytest_fusion.run.memory import Arena, Watch
from pytest_fusion.run.memory import watch as watch_module

CPU = torch.device("cpu")
X = torch.arange(12, dtype=torch.float32).reshape(3, 4)


def overrun(tensor: Tensor, elements: int = 1) -> None:
    """Store into the element after the last one of a dense float32 tensor, as a missing mask does."""
    ctypes.c_float.from_address(tensor.data_ptr() + 4 * (tensor.numel() + elements - 1)).value = 1.0


EMPTY: dict[str, Callable[[], Tensor]] = {
    "empty": lambda: torch.empty(3, 4),
    "empty, size tuple": lambda: torch.empty((3, 4), dtype=torch.float32, device="cpu"),
    "empty, channels last": lambda: torch.empty(1, 3, 2, 2, memory_format=torch.channels_last),
    "empty_like": lambda: torch.empty_like(X),
    "empty_like, bound at import": lambda: empty_like(X),
    "empty_strided": lambda: torch.empty_strided((3, 4), (1, 3)),
    "empty_permuted": lambda: torch.empty_permuted((3, 4), (1, 0)),
    "new_empty": lambda: X.new_empty(3, 4),
    "new_empty_strided": lambda: X.new_empty_strided((3, 4), (4, 1)),
    "Tensor": lambda: torch.Tensor(3, 4),
    "FloatTensor": lambda: torch.FloatTensor(3, 4),
    "new": lambda: X.new(3, 4),
    "scalar": lambda: torch.empty(()),
}
FILLED: dict[str, tuple[Callable[[], Tensor], Tensor]] = {
    "zeros": (lambda: torch.zeros(3, 4), torch.zeros(3, 4)),
    "zeros_like": (lambda: torch.zeros_like(X), torch.zeros(3, 4)),
    "new_zeros": (lambda: X.new_zeros(3, 4), torch.zeros(3, 4)),
    "ones": (lambda: torch.ones(3, 4), torch.ones(3, 4)),
    "ones_like": (lambda: torch.ones_like(X), torch.ones(3, 4)),
    "new_ones": (lambda: X.new_ones(3, 4), torch.ones(3, 4)),
    "full": (lambda: torch.full((3, 4), 2.5), torch.full((3, 4), 2.5)),
    "full_like": (lambda: torch.full_like(X, 2.5), torch.full((3, 4), 2.5)),
    "new_full": (lambda: X.new_full((3, 4), 2.5), torch.full((3, 4), 2.5)),
    "clone": (X.clone, X.clone()),
    "contiguous": (lambda: X.t().contiguous(), X.t().clone()),
    "float": (lambda: X.double().float(), X.clone()),
    "sum of two": (lambda: X + X, 2 * X),
    "concatenation": (lambda: torch.cat([X, X]), X.repeat(2, 1)),
    "padded": (lambda: torch.nn.functional.pad(X, (0, 4)), torch.cat([X, torch.zeros(3, 4)], 1)),
    "product": (lambda: X @ X.t(), X.mm(X.t())),
}


@pytest.mark.parametrize("name", EMPTY)
def test_undefined_memory_is_poisoned_and_guarded(name: str) -> None:
    """Every way to get undefined memory gives the fill, all of it unwritten, and an overrun of it is seen."""
    with Watch(CPU, "nan") as watch:
        made = EMPTY[name]()

    assert made.isnan().all()
    assert watch.unwritten(made).all()
    assert watch.damage() == []
    overrun(made)
    assert [(d.zone, d.elements, d.count > 0) for d in watch.damage()] == [("after", 1, True)]


@pytest.mark.parametrize("name", FILLED)
def test_defined_memory_keeps_its_values(name: str) -> None:
    """Memory that comes with values has them, counts as written, and is guarded all the same."""
    make, expected = FILLED[name]
    with Watch(CPU, "nan") as watch:
        made = make()

    assert torch.equal(made, expected)
    assert watch.unwritten(made) is None
    overrun(made)
    assert [(d.zone, d.elements) for d in watch.damage()] == [("after", 1)]


def test_same_tensor_as_unwatched() -> None:
    """Shape, strides, dtype, requires_grad and storage size are those of an ordinary allocation."""
    makers = [
        *EMPTY.values(),
        lambda: torch.empty(2, 3, dtype=torch.bfloat16, requires_grad=True),
        lambda: torch.empty_like(X.t()),
        lambda: torch.empty_strided((3, 2), (7, 2), dtype=torch.int64),
    ]
    for make in makers:
        plain = make()
        with Watch(CPU, "huge"):
            made = make()

        assert (made.shape, made.stride(), made.storage_offset()) == (plain.shape, plain.stride(), 0)
        assert (made.dtype, made.device, made.requires_grad) == (plain.dtype, plain.device, plain.requires_grad)
        assert made.untyped_storage().nbytes() == plain.untyped_storage().nbytes()
        assert made.is_leaf


def test_unwritten_elements() -> None:
    """Only elements that still hold the fill are unwritten, in a view's own shape and in another dtype's too."""
    with Watch(CPU, "huge") as watch:
        buffer = torch.empty(4, 6)
        half = torch.empty(8, dtype=torch.bfloat16)
    buffer[1, :3] = 7
    half[:3] = 1

    expected = torch.ones(4, 6, dtype=torch.bool)
    expected[1, :3] = False
    assert torch.equal(watch.unwritten(buffer), expected)
    assert torch.equal(watch.unwritten(buffer[1:, ::2].t()), expected[1:, ::2].t())
    assert torch.equal(watch.unwritten(half.view(torch.int32)), torch.tensor([False, False, True, True]))
    assert torch.equal(watch.unwritten(half.view(torch.uint8)), torch.tensor([False] * 6 + [True] * 10))
    assert watch.unwritten(torch.empty(3)) is None


def test_two_fills_tell_an_unwritten_element_from_a_computed_nan() -> None:
    """A computed NaN equals the fill of at most one run; an element that nobody wrote equals both."""

    def kernel() -> Tensor:
        out = torch.empty(3)
        out[0] = 1.0
        out[1] = float("nan")
        return out

    masks = []
    for fill in ("nan", "huge"):
        with Watch(CPU, fill) as watch:
            out = kernel()
        masks.append(watch.unwritten(out))

    assert (masks[0] & masks[1]).tolist() == [False, False, True]


@pytest.fixture
def operators() -> Any:
    """A custom operator that allocates in its body, forward and backward, and one that writes its argument."""
    library = torch.library.Library("fusion_watch_test", "FRAGMENT")
    made: list[Tensor] = []

    @torch.library.custom_op("fusion_watch_test::double", mutates_args=())
    def double(x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        made.append(out)
        return out.copy_(x).mul_(2)

    @torch.library.custom_op("fusion_watch_test::store", mutates_args=("out",))
    def store(x: Tensor, out: Tensor) -> None:
        out.copy_(double(x))

    double.register_fake(torch.empty_like)
    double.register_autograd(lambda ctx, grad: double(grad.contiguous()))
    library.define("plain(Tensor x) -> Tensor")

    def plain(x: Tensor) -> Tensor:
        out = x.new_empty(x.shape)
        made.append(out)
        return out.copy_(x)

    library.impl("plain", plain, "CPU")
    yield torch.ops.fusion_watch_test, made
    library._destroy()


def test_custom_operators_are_watched_inside(operators: Any) -> None:
    """Allocations in the bodies of custom operators are seen: nested, in backward, and by torch.library.impl."""
    ops, made = operators
    x = X.clone().requires_grad_()
    with Watch(CPU, "nan") as watch:
        ops.double(x).sum().backward()
        ops.store(X, torch.empty(3, 4))
        ops.plain(X)

    assert torch.equal(x.grad, torch.full((3, 4), 2.0))
    assert len(made) == 4
    assert all(watch.unwritten(out) is not None for out in made)
    overrun(made[1])
    assert len(watch.damage()) == 1


def test_custom_operator_under_another_mode(operators: Any) -> None:
    """A mode of the user's own still sees a custom operator that is called inside a watch."""
    ops, _ = operators
    seen = []

    class Log(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    with Log(), Watch(CPU, "nan"):
        out = ops.double(X)

    assert torch.equal(out, 2 * X)
    assert "fusion_watch_test.double.default" in seen


def test_backward_is_watched() -> None:
    """Allocations in an autograd.Function's backward are seen, on the engine's terms."""
    made: list[Tensor] = []

    class Scale(torch.autograd.Function):
        @staticmethod
        def forward(_: Any, x: Tensor) -> Tensor:
            return torch.empty_like(x).copy_(x)

        @staticmethod
        def backward(_: Any, grad: Tensor) -> Tensor:
            made.append(torch.empty_like(grad, memory_format=torch.contiguous_format))
            return made[0].copy_(grad)

    x = X.clone().requires_grad_()
    with Watch(CPU, "nan") as watch:
        Scale.apply(x).sum().backward()

    assert watch.unwritten(made[0]) is not None


CANNOT_GUARD: dict[str, Callable[[], Any]] = {
    "meta": lambda: torch.empty(3, device="meta"),
    "sparse": lambda: torch.empty(3, 3, layout=torch.sparse_coo),
    "zeros sparse": lambda: torch.zeros(3, 3, layout=torch.sparse_coo),
    "complex": lambda: torch.empty(3, dtype=torch.complex64),
    "quantised": lambda: torch.empty(3, dtype=torch.qint8),
    "no elements": lambda: torch.empty(0, 4),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CANNOT_GUARD)
def test_what_cannot_be_guarded_is_left_alone(name: str) -> None:
    """Kinds of tensors that have no plain memory here come out as they would without a watch."""
    make = CANNOT_GUARD[name]
    plain = make()
    with Watch(CPU, "nan") as watch:
        made = make()

    assert watch.allocations == 0
    assert (made.shape, made.dtype, made.device, made.layout) == (plain.shape, plain.dtype, plain.device, plain.layout)
    assert watch.unwritten(made) is None


def test_fake_tensors_are_left_alone() -> None:
    """Tracing with fake tensors inside a watch allocates nothing real."""
    with Watch(CPU, "nan") as watch, FakeTensorMode():
        assert type(torch.empty(1 << 50)).__name__ == "FakeTensor"

    assert watch.allocations == 0


def test_errors_are_torchs_own() -> None:
    """A wrong or impossible request raises what it would raise without a watch."""
    with Watch(CPU, "nan"):
        with pytest.raises(RuntimeError, match="negative dimension"):
            torch.empty(-1)
        with pytest.raises(TypeError):
            torch.empty("three")
        with pytest.raises(RuntimeError, match="allocate"):
            torch.empty(1 << 60)


def test_large_allocations_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """What exceeds the limit is allocated without guards, and a full watch checks and frees dead regions first."""
    monkeypatch.setitem(watch_module._HELD_BYTES, "cpu", 100_000)
    with Watch(CPU, "nan") as watch:
        assert watch.unwritten(torch.empty(50_000)) is None
        hurt = torch.empty(5_000)
        overrun(hurt)
        del hurt
        kept = [torch.empty(5_000) for _ in range(10)]

    assert [(d.zone, d.elements) for d in watch.damage()] == [("after", 1)]
    guarded = [watch.unwritten(t) is not None for t in kept]
    assert 2 <= sum(guarded) <= 3


def test_many_allocations_are_looked_at_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    """A result for each of 16,385 chunks, all kept: looked at by each of them, they took 25 s and passed for a hang."""
    monkeypatch.setattr(watch_module, "_HELD_REGIONS", 32)
    monkeypatch.setattr(watch_module, "_MOST_REGIONS", 256)
    looked = []
    settle = Watch._settle

    def settled(self: Watch) -> None:
        looked.append(len(self._regions))
        settle(self)

    monkeypatch.setattr(Watch, "_settle", settled)
    with Watch(CPU, "nan") as watch:
        kept = [torch.empty(3) for _ in range(400)]
    assert watch.allocations == 256
    assert watch.unwritten(kept[0]) is not None
    assert watch.unwritten(kept[-1]) is None
    assert sum(looked) <= 9 * len(kept)

    looked.clear()
    with Watch(CPU, "nan") as watch:
        for _ in range(400):
            hurt = torch.empty(3)
        overrun(hurt)
    assert watch.allocations == 400
    assert sum(looked) <= 9 * 400
    assert [(d.zone, d.elements) for d in watch.damage()] == [("after", 1)]


def test_resizing() -> None:
    """Storages can be grown by resize_, by out= and with what they held, though guarded ones cannot."""
    with Watch(CPU, "nan") as watch:
        grown = torch.zeros(4).resize_(6)
        shrunk = torch.zeros(4).resize_(2)
        from_nothing = torch.add(X, 1, out=torch.empty(0))
        buffer = torch.empty(12)
        into = torch.add(X, 1, out=buffer.view(3, 4))
        stale = torch.ones(2, 2)
        with pytest.warns(UserWarning, match="resized"):
            torch.add(X, 1, out=stale)

    assert torch.equal(grown[:4], torch.zeros(4))
    assert torch.equal(shrunk, torch.zeros(2))
    assert all(torch.equal(out, X + 1) for out in (from_nothing, into, stale))
    assert not watch.unwritten(buffer).any()
    assert watch.damage() == []


def test_work_is_counted() -> None:
    """Operators of torch that compute or copy are, those of users, views and fresh memory are not."""
    with Watch(CPU, "nan") as watch:
        out = torch.empty_like(X).t()
        assert watch.worked == 0
        out.copy_(X.clone().t())
        X.double().add_(1)
        assert watch.worked == 4


def test_storages_may_be_swapped() -> None:
    """set_, .data and pickling of watched tensors work."""
    with Watch(CPU, "nan") as watch:
        a, b = torch.zeros(4), torch.ones(6)
        a.set_(b.untyped_storage(), 1, (5,), (1,))
        b.data = torch.full((2,), 3.0)
        c = torch.empty(5).copy_(a)
        c.share_memory_()

    assert torch.equal(a, torch.ones(5))
    assert torch.equal(b, torch.full((2,), 3.0))
    assert torch.equal(c, a)
    assert watch.damage() == []


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_grad_modes(context: Callable[[], Any]) -> None:
    """Watched tensors work under no_grad and inference_mode, and are inference tensors there."""
    with context(), Watch(CPU, "nan"):
        out = torch.empty_like(X).copy_(X)
        out += torch.ones_like(X)
        assert out.is_inference() == torch.is_inference_mode_enabled()

    assert torch.equal(out, X + 1)


def test_vmap_and_functional_transforms() -> None:
    """Batched and functionalised tensors pass through a watch."""
    with Watch(CPU, "nan"):
        batched = torch.func.vmap(lambda row: torch.empty_like(row).copy_(row) + torch.zeros(4))(X)
        functional = torch.func.functionalize(lambda x: torch.zeros_like(x).add_(x))(X)
        gradient = torch.func.grad(lambda x: (x * torch.ones_like(x)).sum())(X)

    assert torch.equal(batched, X)
    assert torch.equal(functional, X)
    assert torch.equal(gradient, torch.ones(3, 4))


def test_compiled_candidates_stay_compiled() -> None:
    """torch.compile compiles inside a watch, once, and what it compiled runs before, inside and after one."""
    compiled = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        compiled.append(graph)
        return graph.forward

    @torch.compile(backend=backend)
    def kernel(x: Tensor) -> Tensor:
        return torch.empty_like(x).copy_(x) + 1

    torch._dynamo.reset()
    for fill in ("nan", "huge"):
        with Watch(CPU, fill):
            assert torch.equal(kernel(X), X + 1)
        assert torch.equal(kernel(X), X + 1)

    assert len(compiled) == 1


def test_watches_nest_and_repeat() -> None:
    """A watch can be entered again, inside itself and after an exception, and outside one nothing is watched."""
    watch = Watch(CPU, "nan")

    def broken() -> None:
        with watch, watch:
            torch.empty(2)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        broken()
    with watch:
        torch.empty(2)
    torch.empty(2)

    assert watch.allocations == 2


def test_fills_of_watch_and_arena_differ() -> None:
    """The guard of an allocation never holds the bits of an input's guard."""
    for fill in ("nan", "huge"):
        x = Arena(CPU, fill).tensor("x", Geometry((4,), (1,), 0, 4), torch.bfloat16)
        with Watch(CPU, fill) as watch:
            out = torch.empty(4, dtype=torch.bfloat16)
        ctypes.memmove(out.data_ptr(), x.data_ptr(), 8 + 16)

        assert [(d.zone, d.count > 0) for d in watch.damage()] == [("after", True)]


def test_views_stay_views() -> None:
    """What torch returns without a copy shares memory under a watch as well."""
    layers = torch.nn.functional
    same = [
        X.view(12), X.t(), X[1:], X.detach(), X.contiguous(), X.to(torch.float32), X.reshape(4, 3), X.expand(2, 3, 4),
    ]  # fmt: skip
    with Watch(CPU, "nan") as watch, torch.inference_mode():
        made = [
            X.view(12), X.t(), X[1:], X.detach(), X.contiguous(), X.to(torch.float32), X.reshape(4, 3),
            X.expand(2, 3, 4), layers.dropout(X, 0.5, training=False), layers.dropout(X, 0.0, training=False),
        ]  # fmt: skip

    assert watch.allocations == 0
    assert {t.untyped_storage().data_ptr() for t in made} == {t.untyped_storage().data_ptr() for t in same}


def test_padding_of_its_own_is_the_candidates() -> None:
    """A kernel may write between the rows of a buffer that it allocated itself, not past the buffer's end."""
    with Watch(CPU, "nan") as watch:
        out = torch.empty_strided((3, 4), (8, 1))
    ctypes.memset(out.data_ptr(), 0xAB, 4 * 20)
    assert watch.damage() == []

    ctypes.memset(out.data_ptr(), 0xAB, 4 * 24)
    assert [(d.zone, d.elements, d.count) for d in watch.damage()] == [("after", 1, 16)]


def test_memory_is_freed_at_once() -> None:
    """The regions of a watch go with it, without the help of the garbage collector."""
    gc.collect()
    gc.disable()
    try:
        with Watch(CPU, "nan") as watch:
            torch.ops.aten.empty_like.default(torch.empty(4))
            torch.add(X, 1, out=torch.ones(2, 2).resize_(0))
        region = weakref.ref(watch)
        del watch
        assert region() is None
    finally:
        gc.enable()


def test_higher_order_operators() -> None:
    """torch.cond runs inside a watch."""
    with Watch(CPU, "nan"):
        out = torch.cond(torch.tensor(True), lambda x: x + 1, lambda x: x - 1, (X,))

    assert torch.equal(out, X + 1)


def test_only_what_computes_is_counted() -> None:
    """Allocations, copies, casts and views are no work; an operator that computes is, custom ones too."""
    with Watch(CPU, "nan") as watch:
        torch.empty_like(X).copy_(X).clone().view(12)[3:].t().detach().double().contiguous()
        assert watch.computed == 0
        X + 1
        X.sum(0)
        torch.empty_like(X).fill_(3)
        assert watch.computed == 3
