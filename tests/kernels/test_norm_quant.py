"""The norm_quant kernel beyond its specs: a second source of the reference, registration, what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

from reference_kernels.norm_quant import (
    add_norm_quant,
    add_norm_quant_reference,
    norm_quant,
    norm_quant_reference,
)
from reference_kernels.norm_quant.kernel import _norm_quant, config
from reference_kernels.norm_quant.reference import FLOOR, LIMITS

CHOICES = [
    pytest.param(norm, codes, group, id=f"{norm} {codes} {group or 'row'}")
    for norm in ("rms", "layer")
    for codes in ("fp8", "int8")
    for group in (None, 16, 128)
]


def _normal(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(13)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def _all_codes(codes: str) -> torch.Tensor:
    """Every value that a code may have, ascending, float64."""
    if codes == "int8":
        return torch.arange(-127, 128, dtype=torch.float64)
    every = torch.arange(256).to(torch.uint8).view(torch.float8_e4m3fn).double()
    return every[every.isfinite()].unique()


def _by_definition(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, norm: str, codes: str, group: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """torch's own norm, then for each group of columns the nearest code, by trying all of them; float64."""
    width = x.shape[-1]
    if norm == "layer":
        normalised = F.layer_norm(x, (width,), weight, bias, 1e-5)
    else:
        normalised = F.rms_norm(x, (width,), weight, 1e-5) + bias
    known = _all_codes(codes)
    quantised, scales = [], []
    for part in normalised.split(group or width, -1):
        scale = part.abs().max(-1, keepdim=True).values / known[-1]
        quantised.append(known[((part / scale)[..., None] - known).abs().argmin(-1)])
        scales.append(scale)
    return torch.cat(quantised, -1), torch.cat(scales, -1)


def _steps(left: torch.Tensor, right: torch.Tensor, codes: str) -> torch.Tensor:
    """How many codes lie between."""
    known = _all_codes(codes)
    return (torch.searchsorted(known, left.double()) - torch.searchsorted(known, right.double())).abs()


@pytest.mark.parametrize(("norm", "codes", "group"), CHOICES)
def test_the_reference_is_the_definition(norm: str, codes: str, group: int | None) -> None:
    """In float64 codes and scales are those of torch's norms and of the nearest code, the last group being partial."""
    x, weight, bias = _normal((5, 200), (200,), (200,), dtype=torch.float64)
    wanted, wanted_scales = _by_definition(x, weight, bias, norm, codes, group)

    found, scales = norm_quant_reference(x, weight, bias, 1e-5, norm, codes, group, torch.float64)

    torch.testing.assert_close(scales.double(), wanted_scales, rtol=1e-7, atol=0)
    assert int(_steps(found, wanted, codes).sum()) == 0


@pytest.mark.parametrize("width", [200, 3000])
@pytest.mark.parametrize(("norm", "codes", "group"), CHOICES)
def test_the_kernel_is_the_definition(norm: str, codes: str, group: int | None, width: int) -> None:
    """Of the kernel too, in rows of several tiles; a value within float32's rounding of a tie may take either code."""
    x, weight, bias = _normal((5, width), (width,), (width,))
    assert config(width, group).loop
    wanted, wanted_scales = _by_definition(x.double(), weight.double(), bias.double(), norm, codes, group)

    found, scales = norm_quant(x, weight, bias, 1e-5, norm, codes, group)  # type: ignore[arg-type]

    torch.testing.assert_close(scales.double(), wanted_scales, rtol=2e-6, atol=0)
    off = _steps(found, wanted, codes)
    assert int(off.max()) <= 1
    assert int(off.sum()) <= 3
    assert float(found.double().abs().max()) == LIMITS[codes]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_what_is_normalised_is_the_rounded_sum(dtype: torch.dtype) -> None:
    """The sum is torch's own, bit for bit, and codes and scales are those of the sum alone."""
    x, residual, weight = _normal((7, 130), (7, 130), (130,), dtype=dtype)

    codes, scales, summed = add_norm_quant(x, residual, weight, group=32)

    assert torch.equal(summed, x + residual)
    alone, alone_scales = norm_quant(summed, weight, group=32)
    assert torch.equal(codes.view(torch.uint8), alone.view(torch.uint8))
    assert torch.equal(scales, alone_scales)


@pytest.mark.parametrize(("norm", "codes", "group"), CHOICES)
def test_rows_without_a_scale(norm: str, codes: str, group: int | None) -> None:
    """Zeros have the floor's scale and codes of 0; NaN and infinity make scales NaN where they are."""
    x, weight = _normal((4, 40), (40,))
    x[1], x[2, 30], x[3, 30] = 0, torch.nan, torch.inf

    found, scales = norm_quant(x, weight, None, 1e-6, norm, codes, group)  # type: ignore[arg-type]
    wanted, wanted_scales = norm_quant_reference(x, weight, None, 1e-6, norm, codes, group)

    assert scales[1].tolist() == pytest.approx([FLOOR / LIMITS[codes]] * scales.shape[1])
    assert not found[1].double().any()
    assert scales[2].isnan().all()
    assert scales[3].isnan().any()
    assert torch.equal(scales.isnan(), wanted_scales.isnan())
    assert torch.equal(found.double().isnan(), wanted.double().isnan())
    assert bool(found.double().isnan().any()) == (codes == "fp8")
    assert scales[0].isfinite().all()


@pytest.mark.slow
def test_opcheck() -> None:
    """Schema, fake kernel and tracing hold, with and without what is optional, strided inputs and no rows included."""
    x, weight = _normal((6, 40), (40,))
    strided = x.t().contiguous().t()
    torch.library.opcheck(_norm_quant, (strided, None, weight, None, 1e-6, False, "fp8", None))
    torch.library.opcheck(_norm_quant, (x.half(), strided.half(), weight, weight, 1e-6, True, "int8", 32))
    torch.library.opcheck(_norm_quant, (x[:0], None, weight, None, 1e-6, False, "int8", 16))


@pytest.mark.slow
def test_one_graph() -> None:
    """Both functions compile without a graph break."""
    x, residual, weight = _normal((4, 40), (4, 40), (40,))

    def plain(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        codes, scales, summed = add_norm_quant(x, residual, weight, group=32)
        return *norm_quant(summed, weight, codes="int8", norm="layer"), scales, codes.view(torch.uint8)

    whole = torch.compile(plain, fullgraph=True, backend="aot_eager")(x)

    torch.testing.assert_close(whole, plain(x), rtol=0, atol=0)


@pytest.mark.parametrize("group", [None, 16])
@pytest.mark.parametrize("shape", [(0,), (0, 8), (3, 0), (2, 0, 4)])
def test_nothing_gives_nothing(shape: tuple[int, ...], group: int | None) -> None:
    """Sizes of zero give empty codes; a row without elements has the floor's scale, or no group at all."""
    x, weight = torch.empty(shape), torch.empty(shape[-1:])

    found = add_norm_quant(x, x, weight, codes="int8", group=group)

    for got, wanted in zip(found, add_norm_quant_reference(x, x, weight, codes="int8", group=group), strict=True):
        assert got.dtype == wanted.dtype
        torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize(
    ("error", "words", "call"),
    [
        (ValueError, "norm is 'batch', known: rms, layer", lambda x: norm_quant(x, x[0], norm="batch")),
        (ValueError, "codes is 'int4', known: fp8, int8", lambda x: norm_quant(x, x[0], codes="int4")),
        (ValueError, "group is 100, supported: None", lambda x: norm_quant(x, x[0], group=100)),
        (TypeError, "x is float64, allowed: float32", lambda x: norm_quant(x.double(), x[0])),
        (TypeError, "weight is int64", lambda x: norm_quant(x, x[0].long())),
        (ValueError, "norm_quant: x has no dimension", lambda x: norm_quant(x[0, 0], x[0])),
        (ValueError, r"bias has shape \(2,\), the last dimension", lambda x: norm_quant(x, x[0], x[:, 0])),
        (ValueError, "weight is on meta", lambda x: norm_quant(x, x[0].to("meta"))),
        (TypeError, "residual is float16, allowed: float32", lambda x: add_norm_quant(x, x.half(), x[0])),
        (ValueError, "they must be equal", lambda x: add_norm_quant(x, x[:1], x[0])),
    ],
)
def test_what_is_refused(error: type[Exception], words: str, call: Callable[..., Any]) -> None:
    """What the kernel does not support is refused in words, before anything is launched."""
    with pytest.raises(error, match=words):
        call(torch.ones(2, 4))


def test_float8_is_refused_where_the_gpu_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU before capability 8.9 is told of, and pointed to int8, before anything is allocated."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))

    class OnCuda(torch.Tensor):
        device = torch.device("cuda", 0)  # type: ignore[assignment]

    x = torch.ones(2, 4).as_subclass(OnCuda)
    with pytest.raises(ValueError, match=r"has no float8, .* use codes='int8'"):
        _norm_quant._init_fn(x, None, x[0], None, 1e-6, False, "fp8", None)
