"""The AdamW kernel beyond its specs: torch's optimizer as a second source, tables, layouts, what is refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch

pytest.importorskip("triton")

from reference_kernels.adamw import adamw, adamw_reference
from reference_kernels.adamw import kernel as kernel_of_adamw
from reference_kernels.adamw.kernel import MOST_TABLES, _adamw, config

SHAPES = ((5, 70), (3,), (), (0, 4), (1,), (600,))
OPTIONS = {"lr": 0.02, "betas": (0.8, 0.97), "eps": 1e-6, "weight_decay": 0.3}


def _tensors(seed: int, shapes: Sequence[tuple[int, ...]] = SHAPES) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).double() for shape in shapes]


def _zeros(like: Sequence[torch.Tensor], dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [torch.zeros_like(each, dtype=dtype) for each in like]


def _clones(tensors: Sequence[torch.Tensor], dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [each.to(dtype, copy=True) for each in tensors]


def _torchs(parameters: Sequence[torch.Tensor], steps: int) -> list[torch.Tensor]:
    """What `torch.optim.AdamW` makes of these in float64, with gradients of seeds 1, 2, ..."""
    leaves = [each.clone().requires_grad_() for each in parameters]
    optimizer = torch.optim.AdamW(leaves, **OPTIONS)  # type: ignore[arg-type]
    for step in range(1, steps + 1):
        for leaf, gradient in zip(leaves, _tensors(step), strict=True):
            leaf.grad = gradient
        optimizer.step()
    return [leaf.detach() for leaf in leaves]


def test_the_reference_is_torchs() -> None:
    """In float64 a hundred steps of the reference are those of `torch.optim.AdamW`."""
    parameters = _tensors(0)
    wanted = _torchs(parameters, 100)
    mine, first, second = _clones(parameters, torch.float64), *(_zeros(parameters, torch.float64) for _ in range(2))

    for step in range(1, 101):
        adamw_reference(mine, _tensors(step), first, second, step, **OPTIONS, compute=torch.float64)  # type: ignore[arg-type]

    torch.testing.assert_close(mine, wanted, rtol=1e-12, atol=1e-13)


@pytest.mark.slow
def test_the_kernel_is_torchs() -> None:
    """Thirty steps on tensors of six sizes, none and one among them, are torch's in float64 to float32 accuracy."""
    parameters = _tensors(0)
    wanted = _torchs(parameters, 30)
    mine, first, second = _clones(parameters), _zeros(parameters), _zeros(parameters)

    for step in range(1, 31):
        adamw(mine, _clones(_tensors(step)), first, second, step, **OPTIONS)  # type: ignore[arg-type]

    torch.testing.assert_close(_clones(mine, torch.float64), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("wide", [False, True])
def test_parameters_of_16_bits_are_their_masters_rounded(wide: bool) -> None:
    """Masters and moments take the steps of a float32 call, with gradients of 16 bits or of float32."""
    gradients = [_clones(_clones(_tensors(step), torch.bfloat16), torch.float32) for step in (1, 2, 3)]
    masters = _clones(_tensors(0))
    alone = _clones(masters)
    parameters = [torch.full_like(each, torch.nan, dtype=torch.bfloat16) for each in masters]
    moments, others = ([_zeros(masters), _zeros(masters)] for _ in range(2))

    for step, gradient in enumerate(gradients, 1):
        given = gradient if wide else _clones(gradient, torch.bfloat16)
        adamw(parameters, given, *moments, step, **OPTIONS, masters=masters)  # type: ignore[arg-type,misc]
        adamw(alone, gradient, *others, step, **OPTIONS)  # type: ignore[arg-type,misc]

    for got, right in zip((masters, *moments), (alone, *others), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(got, right, strict=True))
    assert all(torch.equal(a, b.bfloat16()) for a, b in zip(parameters, masters, strict=True))


def test_any_dense_layout_and_alignment() -> None:
    """Transposed parameters, views that begin at any element, and gradients laid out otherwise give the same bits."""
    shapes = (7, 40), (33, 8), (300,)
    parameters, gradients = _clones(_tensors(0, shapes)), _clones(_tensors(1, shapes))
    first, second = _zeros(parameters), _zeros(parameters)
    wanted = _clones(parameters), _clones(first), _clones(second)
    adamw(wanted[0], gradients, *wanted[1:], 1)

    def moved(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        transposed = tensors[0].t().contiguous().t()
        shifted = [torch.empty(each.numel() + 1)[1:].view(each.shape).copy_(each) for each in tensors[1:]]
        return [transposed, *shifted]

    got = moved(parameters), moved(first), moved(second)
    strided = gradients[1].repeat_interleave(2, 1)[:, ::2]
    adamw(got[0], [gradients[0], strided, gradients[2][:1].expand(300)], *got[1:], 1)

    for mine, right in zip(got, wanted, strict=True):
        assert torch.equal(mine[0], right[0])
        assert torch.equal(mine[1], right[1])
    lone = wanted[0][2][:1] * 0 + parameters[2]
    adamw([lone], [gradients[2][:1].expand(300).contiguous()], [first[2]], [second[2]], 1)
    assert torch.equal(got[0][2], lone)


@pytest.mark.slow
def test_the_table_is_made_once() -> None:
    """Steps on the same tensors share one table; other tensors at other places get their own; few are kept."""
    kernel_of_adamw._tables.clear()
    parameters, first, second, gradients = (_clones(_tensors(seed)) for seed in range(4))
    second = [each.abs() for each in second]

    for step in (1, 2, 3):
        adamw(parameters, gradients, first, second, step)
    assert len(kernel_of_adamw._tables) == 1

    others = [_clones(gradients) for _ in range(2 * MOST_TABLES)]
    for fresh in others:
        adamw(parameters, fresh, first, second, 4)
    assert len(kernel_of_adamw._tables) == MOST_TABLES


def test_a_tensor_of_several_programs() -> None:
    """Every element is written once, whatever the tensors' sizes in chunks."""
    size = config().elements
    shapes = [(size + k,) for k in (-1, 0, 1)] + [(3 * size + 5,), (1,)]
    parameters, gradients = _clones(_tensors(0, shapes)), _clones(_tensors(1, shapes))
    moments = _zeros(parameters), _zeros(parameters)
    wanted = _clones(parameters), *(_clones(each) for each in moments)

    adamw(parameters, gradients, *moments, 1)
    adamw_reference(wanted[0], gradients, *wanted[1:], 1)

    torch.testing.assert_close((parameters, *map(list, moments)), (*map(list, wanted),), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_opcheck_and_one_graph() -> None:
    """The operator says what it writes, and a compiled step writes what an eager one does."""
    sets = [[_clones(_tensors(seed)) for seed in range(3)] for _ in range(3)]
    for parameters, gradients, first in sets:
        second = _zeros(parameters)
        if parameters is sets[0][0]:
            numbers = (1, 1e-3, 0.9, 0.99, 1e-8, 0.1)
            torch.library.opcheck(_adamw, (parameters, gradients, first, second, [], *numbers))
        elif parameters is sets[1][0]:
            torch.compile(adamw, fullgraph=True, backend="aot_eager")(parameters, gradients, first, second, 3)
        else:
            adamw(parameters, gradients, first, second, 3)
    assert all(torch.equal(a, b) for a, b in zip(sets[1][0], sets[2][0], strict=True))
    assert all(torch.equal(a, b) for a, b in zip(sets[1][2], sets[2][2], strict=True))


def test_leaves_that_require_grad() -> None:
    """A parameter that requires grad is written like any other, outside of the graph."""
    leaf = torch.ones(5, requires_grad=True)
    adamw([leaf], [torch.ones(5)], [torch.zeros(5)], [torch.zeros(5)], 1, lr=0.5, weight_decay=0.0)
    torch.testing.assert_close(leaf.detach(), torch.full((5,), 0.5))
    assert leaf.is_leaf


def test_nothing_to_do() -> None:
    """No tensors, or none with elements, launch nothing."""
    adamw([], [], [], [], 1)
    adamw(*([torch.empty(0, 3)] for _ in range(4)), 1)  # type: ignore[misc]


Lists = dict[str, list[torch.Tensor]]


@pytest.mark.parametrize(
    ("error", "words", "change"),
    [
        (TypeError, r"parameters\[0\] is float64", lambda x: {"parameters": [x.double()] * 2}),
        (TypeError, r"parameters\[1\] is float16, allowed: float32", lambda x: {"parameters": [x, x.half()]}),
        (TypeError, r"gradients\[1\] is float16, allowed: float32", lambda x: {"gradients": [x, x.half()]}),
        (TypeError, r"gradients\[0\] is float16, allowed: float32", lambda x: {"gradients": [x.half()] * 2}),
        (TypeError, r"first\[0\] is bfloat16", lambda x: {"first": [x.bfloat16(), x]}),
        (TypeError, r"masters\[1\] is float16", lambda x: {"masters": [x, x.half()]}),
        (ValueError, "2 parameters, 1 gradients, 2 first, 2 second", lambda x: {"gradients": [x]}),
        (ValueError, "2 second, 0 masters", lambda x: {"masters": []}),
        (ValueError, r"second\[1\] has shape \(3, 4\), its parameter \(4, 3\)", lambda x: {"second": [x, x.t()]}),
        (ValueError, r"gradients\[0\] has shape \(3,\)", lambda x: {"gradients": [x[0], x]}),
        (ValueError, r"strides \(6, 2\)", lambda x: {"parameters": [x.repeat(1, 2).view(4, 6)[:, ::2], x]}),
        (ValueError, r"first\[0\] has shape \(4, 3\) and strides \(1, 4\)", lambda x: {"first": [x.view(3, 4).t(), x]}),
        (ValueError, r"masters\[1\] is on meta", lambda x: {"masters": [x, x.to("meta")]}),
        (ValueError, "step is 0", lambda _: {"step": 0}),
        (ValueError, "betas are", lambda _: {"betas": (0.9, 1.0)}),
        (ValueError, "lr=-1", lambda _: {"lr": -1.0}),
        (ValueError, "eps=nan", lambda _: {"eps": float("nan")}),
    ],
)
def test_what_is_refused(error: type[Exception], words: str, change: Callable[[torch.Tensor], Lists]) -> None:
    """What the kernel does not support is refused in words, before anything is launched or written."""
    given = {name: [torch.ones(4, 3) for _ in range(2)] for name in ("parameters", "gradients", "first", "second")}
    with pytest.raises(error, match=words):
        adamw(**{"step": 1, **given, **change(torch.ones(4, 3))})  # type: ignore[arg-type]
    for tensors in given.values():
        assert all(torch.equal(each, torch.ones(4, 3)) for each in tensors)
