"""The batch_norm kernels beyond their specs: torch as a second source, far means, layouts, what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

from reference_kernels.batch_norm import batch_norm, batch_norm_reference
from reference_kernels.batch_norm.backward import batch_norm_backward
from reference_kernels.batch_norm.kernel import _batch_norm, _statistics
from reference_kernels.batch_norm.layout import plan_of

# Channels first: tiles of several rows, several tiles a row; one channel; channels as the last dimension.
SHAPES = (4, 5, 7, 3), (2, 3, 300), (6, 1, 3, 3), (90, 70), (2, 3, 2, 5, 4), (9, 4, 1, 1)
NAMES = ("x", "weight", "bias", "residual")


def _inputs(shape: tuple[int, ...], offset: float = 0.0) -> dict[str, torch.Tensor]:
    """x, residual, vectors and running statistics, in float64 of float32's values."""
    generator = torch.Generator().manual_seed(5)
    channels = shape[1]
    sizes = {"x": shape, "residual": shape, **dict.fromkeys(("weight", "bias", "running_mean"), (channels,))}
    found = {name: torch.randn(size, generator=generator).double() for name, size in sizes.items()}
    found["x"] += offset
    return {**found, "running_var": torch.rand(channels, generator=generator).double() + 0.5}


def _torchs(given: dict[str, torch.Tensor], training: bool, relu: bool) -> torch.Tensor:
    running = given["running_mean"], given["running_var"]
    y = F.batch_norm(given["x"], *running, given["weight"], given["bias"], training, 0.3, 1e-3) + given["residual"]
    return y.relu() if relu else y


def _copies(given: dict[str, torch.Tensor], dtype: torch.dtype = torch.float64) -> dict[str, torch.Tensor]:
    found = {name: each.detach().to(dtype, copy=True) for name, each in given.items()}
    for name in NAMES:
        found[name].requires_grad_()
    return found


@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_reference_and_kernel_are_torchs(shape: tuple[int, ...], training: bool, relu: bool) -> None:
    """Result, running statistics and gradients are those of ``torch.nn.functional.batch_norm``: of the reference in
    float64, of the kernels to float32 accuracy."""
    given = _inputs(shape)
    right, reference, kernel = _copies(given), _copies(given), _copies(given, torch.float32)
    up = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    wanted = _torchs(right, training, relu)
    options: dict[str, Any] = {"training": training, "momentum": 0.3, "eps": 1e-3, "relu": relu}

    results = (
        (right, wanted),
        (reference, batch_norm_reference(**reference, **options, compute=torch.float64)),  # type: ignore[arg-type]
        (kernel, batch_norm(**kernel, **options)),
    )

    every = []
    for tensors, y in results:
        gradients = torch.autograd.grad(y, [tensors[name] for name in NAMES], up.to(y.dtype))
        every.append([each.double() for each in (y, tensors["running_mean"], tensors["running_var"], *gradients)])
    torch.testing.assert_close(every[1], every[0], rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(every[2], every[0], rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("shape", [(13, 40, 37), (23, 64)])
@pytest.mark.parametrize("scale", [1.0, 2.0**115])
def test_means_near_zero_are_those_of_a_plain_sum(shape: tuple[int, ...], scale: float) -> None:
    """Numbers of 8 bits on both sides of zero: what is subtracted from them first takes no digits of their sum, which a
    whole mean of them does, half a unit of theirs."""
    generator = torch.Generator().manual_seed(2)
    signs = torch.randn(shape, generator=generator).sign()
    x = ((torch.rand(shape, generator=generator) + 1) * signs * scale).bfloat16()
    running = torch.zeros(shape[1])

    batch_norm(x, running_mean=running, momentum=1.0)

    error = running.double() - x.double().transpose(0, 1).flatten(1).mean(1)
    assert float(error.square().mean().sqrt()) < 2.0**-26 * scale


@pytest.mark.parametrize("shape", [(4, 5, 7, 3), (90, 70), (40, 3, 40)])
def test_channels_far_from_zero_keep_their_digits(shape: tuple[int, ...]) -> None:
    """Around 3000 with unit variance results are those of float64 to 2e-6, and variances to a part in 100,000: neither
    the mean's own rounding, up to 1.2e-4, nor its square shows."""
    mine = _copies(_inputs(shape, offset=3000.0), torch.float32)
    right = _copies(mine)
    wanted = F.batch_norm(right["x"], right["running_mean"], right["running_var"], training=True, momentum=1.0)

    y = batch_norm(mine["x"], running_var=mine["running_var"], momentum=1.0)

    torch.testing.assert_close(y.double(), wanted, rtol=0, atol=2e-6)
    torch.testing.assert_close(mine["running_var"].double(), right["running_var"], rtol=1e-5, atol=0)


def test_parts_of_different_levels_are_combined() -> None:
    """Images of very different brightness, whose parts have other shifts, give the variance of them all."""
    x = torch.randn(60, 2, 50, generator=torch.Generator().manual_seed(2))
    x += 10 * torch.arange(60.0)[:, None, None]
    assert plan_of(x).parts > 1

    got = batch_norm(x)

    torch.testing.assert_close(got.double(), F.batch_norm(x.double(), None, None, training=True), rtol=0, atol=1e-6)


@pytest.mark.parametrize("training", [True, False])
def test_any_layout(training: bool) -> None:
    """Channels last, padded, expanded and transposed inputs give what contiguous ones give; channels stay last."""
    given = {name: each.float() for name, each in _inputs((4, 6, 5, 3)).items()}
    running = given["running_mean"], given["running_var"]
    vectors = given["weight"], given["bias"]

    def call(x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x = x.detach().requires_grad_()
        y = batch_norm(x, *vectors, *(each.clone() for each in running), training, residual=residual, relu=True)
        return y, *torch.autograd.grad(y, x, residual)

    wanted = call(given["x"], given["residual"])
    layouts = (
        lambda t: t.contiguous(memory_format=torch.channels_last),
        lambda t: F.pad(t, (1, 2))[..., 1:-2],
        lambda t: t.transpose(0, 3).contiguous().transpose(0, 3),
        lambda t: t.transpose(2, 3).contiguous().transpose(2, 3),
        lambda t: t,
    )
    for change in layouts:
        for other in layouts[::2]:
            got = call(change(given["x"]), other(given["residual"]))
            torch.testing.assert_close(got, wanted, rtol=1e-5, atol=2e-6)
    last = call(layouts[0](given["x"]), given["residual"])
    assert all(each.is_contiguous(memory_format=torch.channels_last) for each in last)


def test_what_is_not_given() -> None:
    """Without vectors, residual and running statistics it is the plain norm; only what requires grad gets one."""
    x = torch.randn(6, 4, 5, generator=torch.Generator().manual_seed(3))
    torch.testing.assert_close(batch_norm(x), F.batch_norm(x, None, None, training=True), rtol=1e-5, atol=1e-6)
    mean = torch.zeros(4)
    batch_norm(x, running_mean=mean, momentum=1.0)
    torch.testing.assert_close(mean, x.mean((0, 2)))
    for relu in (False, True):
        weight, residual = torch.ones(4, requires_grad=True), torch.ones(6, 4, 5, requires_grad=True)
        y = batch_norm(x, weight, residual=residual, relu=relu)
        dweight, dresidual = torch.autograd.grad(y, (weight, residual), torch.ones_like(y))
        assert dweight.shape == weight.shape
        torch.testing.assert_close(dresidual, (y > 0).float() if relu else torch.ones_like(y))


def test_nan_and_infinity_stay_in_their_channel() -> None:
    """NaN or an infinity makes its channel NaN in training, and no other; a constant channel gives its bias."""
    x = torch.randn(4, 5, 6, generator=torch.Generator().manual_seed(3))
    x[1, 0, 2], x[0, 1, 0], x[3, 2, 5] = float("nan"), float("inf"), -float("inf")
    x[:, 3] = 7e20
    y = batch_norm(x, bias=torch.full((5,), 2.0), relu=True)
    assert torch.equal(y.isnan().all(2).all(0), torch.tensor([True, True, True, False, False]))
    assert torch.equal(y[:, 3], torch.full((4, 6), 2.0))
    assert y[:, 4].isfinite().all()


@pytest.mark.slow
def test_opcheck() -> None:
    """Schema, fake kernels, autograd registration and tracing hold, for channels first and last, and for nothing."""
    given = {name: each.float() for name, each in _inputs((4, 6, 5, 3)).items()}
    vectors = given["weight"].clone().requires_grad_(), given["bias"].clone().requires_grad_()
    for x in (given["x"], given["x"].contiguous(memory_format=torch.channels_last), torch.empty(0, 6, 2)):
        statistics = _statistics(x, None, None, 0.1, 1e-5)
        torch.library.opcheck(_statistics, (x, given["running_mean"], given["running_var"], 0.1, 1e-5))
        leaf = x.clone().requires_grad_()
        torch.library.opcheck(_batch_norm, (leaf, *vectors, x, *statistics.unbind(0), 1e-5, True))
        backward = (x, x, x, vectors[0].detach(), *statistics.unbind(0), 1e-5, True)
        torch.library.opcheck(batch_norm_backward, backward)


@pytest.mark.slow
def test_one_graph() -> None:
    """Training with running statistics, and the gradients, compile without a graph break and write the same."""
    given = _inputs((4, 6, 5, 3))
    plain, whole = (_copies(given, torch.float32) for _ in range(2))

    def call(tensors: dict[str, torch.Tensor]) -> torch.Tensor:
        return batch_norm(**tensors, relu=True).square()  # type: ignore[arg-type]

    wanted = call(plain)
    got = torch.compile(call, fullgraph=True, backend="aot_eager")(whole)

    torch.testing.assert_close(got, wanted, rtol=0, atol=0)
    for name in ("running_mean", "running_var"):
        assert torch.equal(plain[name], whole[name])
        assert not torch.equal(plain[name].double(), given[name])
    gradients = [
        torch.autograd.grad(y.sum(), [tensors[name] for name in NAMES])
        for y, tensors in ((got, whole), (wanted, plain))
    ]
    torch.testing.assert_close(*gradients, rtol=0, atol=0)


def test_a_second_derivative_is_refused() -> None:
    """The backward kernels have no gradient of their own, and say so instead of leaving a term out."""
    x = torch.randn(3, 2, 4, requires_grad=True)
    (first,) = torch.autograd.grad(batch_norm(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="no autograd formula was registered"):
        torch.autograd.grad(first.square().sum(), x)


@pytest.mark.parametrize("shape", [(0, 3), (0, 3, 4), (2, 0, 4), (2, 3, 0), (0, 0)])
def test_sizes_of_zero(shape: tuple[int, ...]) -> None:
    """Nothing gives nothing; gradients of the vectors are zeros and running statistics stay what they were."""
    x = torch.empty(shape, requires_grad=True)
    weight, bias = (torch.ones(shape[1], requires_grad=True) for _ in range(2))
    mean, var = torch.full((shape[1],), 2.0), torch.full((shape[1],), 3.0)
    for training in (True, False):
        y = batch_norm(x, weight, bias, mean, var, training, residual=x, relu=True)
        assert y.shape == shape
        gradients = torch.autograd.grad(y.sum(), (x, weight, bias))
        assert [each.shape for each in gradients] == [x.shape, weight.shape, bias.shape]
        assert not any(each.any() for each in gradients)
    assert torch.equal(mean, torch.full((shape[1],), 2.0))
    assert torch.equal(var, torch.full((shape[1],), 3.0))


@pytest.mark.parametrize(
    ("error", "words", "call"),
    [
        (TypeError, "x is float64, allowed: float32", lambda x, w: batch_norm(x.double())),
        (TypeError, "weight is int64", lambda x, w: batch_norm(x, w.long())),
        (TypeError, "running_var is float64", lambda x, w: batch_norm(x, running_var=w.double())),
        (TypeError, "residual is float16, allowed: float32", lambda x, w: batch_norm(x, residual=x.half())),
        (ValueError, "x has 1 dimensions", lambda x, w: batch_norm(w)),
        (ValueError, "x has 6 dimensions", lambda x, w: batch_norm(x[None, None, None])),
        (ValueError, r"bias has shape \(2,\), x needs \(3,\)", lambda x, w: batch_norm(x, w, w[:2])),
        (ValueError, r"running_mean has shape \(3, 1\)", lambda x, w: batch_norm(x, running_mean=w[:, None])),
        (ValueError, r"residual \(3, 4\); they must be equal", lambda x, w: batch_norm(x, residual=x[0])),
        (ValueError, "one value a channel", lambda x, w: batch_norm(x[:1, :, :1])),
        (ValueError, "one of them is missing", lambda x, w: batch_norm(x, running_mean=w, training=False)),
        (ValueError, "momentum=2", lambda x, w: batch_norm(x, momentum=2.0)),
        (ValueError, "eps=-1", lambda x, w: batch_norm(x, eps=-1.0)),
        (ValueError, "weight is on meta", lambda x, w: batch_norm(x, w.to("meta"))),
    ],
)
def test_what_is_refused(error: type[Exception], words: str, call: Callable[..., object]) -> None:
    """What the kernels do not support is refused in words, before anything is launched."""
    with pytest.raises(error, match=words):
        call(torch.ones(2, 3, 4), torch.ones(3))
