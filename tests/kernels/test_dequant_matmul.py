"""The dequant_matmul kernels beyond their specs: formats of codes, second sources, parts of sums, what is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

from reference_kernels.dequant_matmul import (
    fp8_linear,
    fp8_linear_reference,
    int4_linear,
    int4_linear_reference,
    int8_linear,
    int8_linear_reference,
    kernel,
    pack_int4,
    quantise_fp8,
    quantise_int4,
    quantise_int8,
    unpack_int4,
)
from reference_kernels.dequant_matmul.tiles import config

SIZES = [(3, 5, 7), (40, 100, 70), (12, 200, 9), (17, 300, 33)]  # rows, k, n: one tile; several; tails of everything
FP8 = torch.float8_e4m3fn


def _normal(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float16) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def _close(got: torch.Tensor, wanted: torch.Tensor) -> None:
    unit = {torch.float16: 2**-10, torch.bfloat16: 2**-7, torch.float32: 1e-5}[got.dtype]
    torch.testing.assert_close(got.double(), wanted, rtol=unit, atol=1e-3 * float(wanted.abs().amax()) * unit)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("rows", "k", "n"), SIZES)
def test_int8_is_a_layer_of_the_expanded_weight(rows: int, k: int, n: int, dtype: torch.dtype) -> None:
    """Reference in float64 and kernel are `F.linear` of codes times scales, of every code, -128 included."""
    (x,) = _normal((rows, k), dtype=dtype)
    codes = torch.randint(-128, 128, (n, k), generator=torch.Generator().manual_seed(1), dtype=torch.int8)
    codes[0, :2] = torch.tensor([-128, 127])
    scales = torch.linspace(0.01, 2, n)
    wanted = F.linear(x.double(), torch.einsum("nk,n->nk", codes.double(), scales.double()))

    exact = int8_linear_reference(x.double(), codes, scales, torch.float64)
    torch.testing.assert_close(exact, wanted)
    _close(int8_linear(x, codes, scales), wanted)


@pytest.mark.parametrize("group", [64, 128])
@pytest.mark.parametrize(("rows", "k", "n"), SIZES)
def test_int4_is_a_layer_of_the_expanded_weight(rows: int, k: int, n: int, group: int) -> None:
    """Reference in float64 and kernel are `F.linear` of codes times the scale of their group, the last of which is not
    full; what fills it up does not count."""
    (x,) = _normal((rows, k))
    codes = torch.randint(-8, 8, (n, k), generator=torch.Generator().manual_seed(2), dtype=torch.int8)
    groups = -(-k // group)
    scales = torch.linspace(0.01, 2, n * groups).view(n, groups)
    weight = torch.stack([codes[:, j].double() * scales[:, j // group].double() for j in range(k)], 1)
    packed = pack_int4(codes, group)

    exact = int4_linear_reference(x.double(), packed, scales, group, torch.float64)
    torch.testing.assert_close(exact, F.linear(x.double(), weight))
    _close(int4_linear(x, packed, scales, group), F.linear(x.double(), weight))
    if k % group:
        filled = packed | torch.full_like(packed, -4096).masked_fill(_full(k, group).logical_not(), 0)
        assert torch.equal(int4_linear(x, filled, scales, group), int4_linear(x, packed, scales, group))


def _full(k: int, group: int) -> torch.Tensor:
    """Which words' fourth column lies beyond ``k``."""
    word = torch.arange(-(-k // group) * group // 4)
    return word // (group // 4) * group + 3 * (group // 4) + word % (group // 4) >= k


@pytest.mark.parametrize("by_row", [True, False])
@pytest.mark.parametrize(("rows", "k", "n"), SIZES)
def test_fp8_is_a_layer_of_the_expanded_operands(rows: int, k: int, n: int, by_row: bool) -> None:
    """Reference in float64 and kernel are `F.linear` of both operands times their scales, by row or one for all."""
    x, weight = _normal((rows, k), (n, k), dtype=torch.float32)
    (x_codes, x_scales), (codes, scales) = quantise_fp8(x, by_row), quantise_fp8(weight, by_row)
    scales = scales.squeeze(1) if by_row else scales
    expanded = codes.double() * (scales.double()[:, None] if by_row else scales.double())
    wanted = F.linear(x_codes.double() * x_scales.double(), expanded)

    for dtype in (torch.bfloat16, torch.float32):
        _close(fp8_linear(x_codes, codes, x_scales, scales, dtype), wanted)
    torch.testing.assert_close(
        fp8_linear_reference(x_codes, codes, x_scales, scales, torch.float64, torch.float64), wanted
    )


def test_packed_codes_come_back() -> None:
    """Every code survives packing in every column of a group, full or not, and a word is what the docstring says."""
    codes = (torch.arange(16 * 200).view(16, 200) * 7 % 16 - 8).to(torch.int8)
    for group in (64, 128):
        assert torch.equal(unpack_int4(pack_int4(codes, group), 200, group), codes)
    one = torch.zeros(1, 64, dtype=torch.int8)
    one[0, [0, 17, 34, 51]] = torch.tensor([-7, -6, -5, -4], dtype=torch.int8)
    words = pack_int4(one, 64)[0].tolist()
    assert [word & 0xFFFF for word in words[:4]] == [0x8881, 0x8828, 0x8388, 0x4888]


def test_quantised_weights_are_near() -> None:
    """What a weight becomes is off by half a step of its codes at most; rows of zeros are zeros."""
    (weight,) = _normal((9, 150), dtype=torch.float32)
    weight[3] = 0
    codes, scales = quantise_int8(weight)
    assert ((codes * scales[:, None] - weight).abs() <= scales[:, None] * 0.501).all()
    packed, group_scales = quantise_int4(weight, 64)
    steps = group_scales.repeat_interleave(64, 1)[:, :150]
    assert ((unpack_int4(packed, 150, 64) * steps - weight).abs() <= steps * 0.501).all()
    for by_row in (True, False):
        float8, scale = quantise_fp8(weight, by_row)
        assert ((float8.float() * scale - weight).abs() <= weight.abs() * 2**-4 + scale * 2**-10).all()


def test_parts_of_a_sum_are_added_in_order() -> None:
    """Interpreted, 300 products are three parts, whose sum is the same bits every time and near the whole."""
    assert config(16, 33, 300, "int8").splits == 3
    (x,) = _normal((16, 300))
    codes, scales = quantise_int8(torch.ones(33, 300))

    first, again = (int8_linear(x, codes, scales) for _ in range(2))

    assert torch.equal(first, again)
    _close(first, int8_linear_reference(x.double(), codes, scales, torch.float64))


def test_tiles_of_a_gpu() -> None:
    """The tiles that were timed; a weight of few rows is parts until every multiprocessor has several programs; short
    sums are not; many rows take tiles 128 wide."""
    for rows, kind, wanted in (
        (1, "int4", (64, 8, 128, 8)),
        (9, "int4", (128, 16, 128, 8)),
        (17, "int4", (64, 32, 128, 2)),
        (64, "int4", (64, 64, 128, 2)),
        (1, "int8", (64, 8, 256, 1)),
        (16, "int8", (64, 16, 256, 1)),
        (33, "int8 words", (128, 64, 64, 1)),
        (512, "int8 words", (128, 128, 32, 1)),
        (512, "int4", (64, 128, 128, 1)),
    ):
        wide = config(rows, 28672, 8192, kind, interpreted=False)
        assert (wide.n, wide.m, wide.k, wide.splits) == wanted
    assert config(1, 4096, 8192, "int8", interpreted=False).splits == 7
    assert config(1, 4096, 512, "int8", interpreted=False).splits == 1
    assert config(64, 4096, 4096, "int8 words", interpreted=False).splits == 4
    assert config(65, 1, 1, "fp8", interpreted=False).n == 128


@pytest.mark.parametrize("k", [34, 300])
def test_words_are_their_codes(k: int) -> None:
    """Codes read two at a time, beside the even and the odd columns of a strided input, and those that cannot be, of
    an odd row stride or address, give the same to one rounding."""
    (x,) = _normal((k, 2, 20))
    x = x.transpose(0, 2)
    codes = torch.randint(-128, 128, (9, k), generator=torch.Generator().manual_seed(3), dtype=torch.int8)
    shifted = torch.empty(9 * k + 1, dtype=torch.int8)[1:].view(9, k).copy_(codes)
    odd = torch.empty(9, k + 1, dtype=torch.int8)[:, :k].copy_(codes)
    scales = torch.ones(9)

    assert kernel._in_words(codes) is not None
    for each in (codes, shifted, odd, codes.t().contiguous().t()):
        assert (each is codes) == (kernel._in_words(each) is not None)
        _close(int8_linear(x, each, scales), F.linear(x.double(), codes.double()))


def test_zero_codes_give_zero() -> None:
    """Codes of 0 give exactly 0, however large the input: no offset is added and taken away."""
    x = torch.full((3, 128), 60000.0, dtype=torch.float16)
    assert not int4_linear(x, pack_int4(torch.zeros(5, 128, dtype=torch.int8)), torch.ones(5, 1)).any()
    assert not int8_linear(x, torch.zeros(5, 128, dtype=torch.int8), torch.ones(5)).any()


def test_infinities_stay_in_their_rows() -> None:
    """NaN and infinity in one row reach no other, and nothing beyond the ends makes a NaN of them."""
    (x,) = _normal((4, 70))
    x[1, 2] = float("inf")
    ones = torch.ones(5, 70, dtype=torch.int8)
    for y in (
        int8_linear(x, ones, torch.ones(5)),
        int4_linear(x, pack_int4(ones, 64), torch.ones(5, 2), 64),
    ):
        assert y[[0, 2, 3]].isfinite().all()
        assert torch.equal(y[1], torch.full_like(y[1], float("inf")))


@pytest.mark.slow
def test_opcheck() -> None:
    """Schema, fake kernels and tracing hold for all operators, strided inputs included."""
    (x,) = _normal((70, 3))
    x = x.t()
    codes, scales = quantise_int8(torch.ones(5, 70))
    torch.library.opcheck(kernel._int8_linear, (x, codes, scales))
    torch.library.opcheck(kernel._int4_linear, (x, *quantise_int4(torch.ones(5, 70), 64), 64))
    float8, one = quantise_fp8(torch.ones(5, 70), False)
    # Its check of the schema multiplies inputs, which torch cannot for float8.
    rest = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(kernel._fp8_linear, (x.to(FP8), float8, one, one, torch.bfloat16), test_utils=rest)


@pytest.mark.slow
def test_one_graph() -> None:
    """All kernels compile without a graph break."""
    (x,) = _normal((3, 64))
    int8, int4, fp8 = quantise_int8(torch.ones(64, 64)), quantise_int4(torch.ones(64, 64), 64), quantise_fp8(x.float())

    def forward(x: torch.Tensor) -> torch.Tensor:
        y = int4_linear(int8_linear(x, *int8), *int4, 64)
        return y.float() + fp8_linear(fp8[0], fp8[0], fp8[1], fp8[1][:, 0]).sum()

    whole = torch.compile(forward, fullgraph=True, backend="aot_eager")(x)
    torch.testing.assert_close(whole, forward(x), rtol=0, atol=0)


@pytest.mark.parametrize("shape", [(0,), (0, 64), (3, 0), (2, 0, 64), (2, 3, 64)])
def test_sizes_of_zero_and_more_dimensions(shape: tuple[int, ...]) -> None:
    """Nothing times anything is nothing, or zeros where nothing is summed; batches have any rank."""
    x, k = torch.ones(shape, dtype=torch.float16), shape[-1]
    codes, scales = torch.ones(5, k, dtype=torch.int8), torch.ones(5)
    wanted = torch.full((*shape[:-1], 5), float(k), dtype=torch.float16)

    assert torch.equal(int8_linear(x, codes, scales), wanted)
    assert torch.equal(int4_linear(x, pack_int4(codes, 64), torch.ones(5, -(-k // 64)), 64), wanted)
    one = torch.tensor(1.0)
    assert torch.equal(fp8_linear(x.to(FP8), codes.to(FP8), one, one, torch.float16), wanted)
    assert int8_linear(x, codes[:0], scales[:0]).shape == (*shape[:-1], 0)


@pytest.mark.parametrize(
    ("error", "words", "call"),
    [
        (TypeError, "x is float32, allowed: float16, bfloat16", lambda x, c: int8_linear(x.float(), c, x[0, :3])),
        (TypeError, "codes is uint8, allowed: int8", lambda x, c: int8_linear(x, c.to(torch.uint8), x[0, :3])),
        (TypeError, "packed is int8, allowed: int16", lambda x, c: int4_linear(x, c, x[:, :1])),
        (TypeError, "scales is int8", lambda x, c: int8_linear(x, c, c[:, 0])),
        (
            ValueError,
            r"codes has shape \(64, 3\), x \(3, 64\) needs \(n, 64\)",
            lambda x, c: int8_linear(x, c.t(), x[0]),
        ),
        (ValueError, r"scales has shape \(64,\), allowed: \(3,\)", lambda x, c: int8_linear(x, c, x[0])),
        (ValueError, "group is 32, supported: 64, 128", lambda x, c: int4_linear(x, c, x, 32)),
        (
            ValueError,
            r"packed has shape \(3, 64\), .* \(n, 16\)",
            lambda x, c: int4_linear(x, c.to(torch.int16), x[:, :1], 64),
        ),
        (
            ValueError,
            r"scales has shape \(3, 2\), allowed: \(3, 1\)",
            lambda x, c: int4_linear(x, c[:, :16].to(torch.int16), x[:, :2], 64),
        ),
        (ValueError, "codes is on meta", lambda x, c: int8_linear(x, c.to("meta"), x[0])),
        (ValueError, "x has no dimension", lambda x, c: int8_linear(x[0, 0], c, x[0])),
        (TypeError, "x is float16, allowed: float8_e4m3fn", lambda x, c: fp8_linear(x, c, x, x)),
        (
            ValueError,
            r"x_scales has shape \(3,\), allowed: \(3, 1\) or \(\)",
            lambda x, c: fp8_linear(x.to(FP8), c.to(FP8), x[:, 0].float(), x[:, 0].float()),
        ),
        (
            TypeError,
            "dtype is torch.int8, allowed",
            lambda x, c: fp8_linear(x.to(FP8), c.to(FP8), x[:, :1].float(), x[:, 0].float(), torch.int8),
        ),
        (ValueError, "codes from 8 to 8, allowed: -8 to 7", lambda _, c: pack_int4(c * 8)),
    ],
)
def test_what_is_refused(error: type[Exception], words: str, call: Callable[..., object]) -> None:
    """What the kernels do not support is refused in words, before anything is launched."""
    with pytest.raises(error, match=words):
        call(torch.ones(3, 64, dtype=torch.float16), torch.ones(3, 64, dtype=torch.int8))


def test_a_gpu_without_float8_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before capability 8.9 there is no float8: the operator says so before any launch."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))

    with pytest.raises(ValueError, match=r"cuda:0 has no float8, .* use int8_linear"):
        kernel.check_float8(torch.device("cuda", 0))
    kernel.check_float8(torch.device("cpu"))
