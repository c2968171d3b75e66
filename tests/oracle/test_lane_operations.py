"""Every operation a reference may use: the oracle is the float64 result, and no rule refuses its arguments."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pytest_fusion.oracle import run_lanes

Function = Callable[[Tensor], Tensor]
ROWS, COLUMNS = 6, 32
INDEX = torch.tensor([0, 3, 3, 5, 1, 0, 2])
TARGET = torch.tensor([1, 31, -100, 0, 7, 8])


DRAWN = torch.randn(4096, generator=torch.Generator().manual_seed(5))


def _weight(x: Tensor, *shape: int) -> Tensor:
    return DRAWN[: math.prod(shape)].reshape(shape).to(x.dtype)


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _rotary(x: Tensor) -> Tensor:
    a, b = x[..., ::2], x[..., 1::2]
    return torch.stack([a * a.cos() - b * a.sin(), a * a.sin() + b * a.cos()], -1).flatten(-2)


def _through_views(x: Tensor) -> Tensor:
    z = x * 1.1
    z[:, ::2].mul_(1.3)
    z[1].zero_()
    z.t()[3] += x[:, 0]
    return z


def _gated(x: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return F.silu(a) * b


def _attention(x: Tensor) -> Tensor:
    q = x.reshape(1, 2, 3, COLUMNS)
    return F.scaled_dot_product_attention(q, q * 1.1, q * 0.9, is_causal=True)


def _masked_attention(x: Tensor) -> Tensor:
    q = x.reshape(1, 2, 3, COLUMNS)
    return F.scaled_dot_product_attention(q, q, q, attn_mask=torch.ones(3, 3, dtype=torch.bool).tril())


def _running(x: Tensor) -> Tensor:
    """A batch norm that updates statistics, twice, and what became of them."""
    mean, var = _weight(x, COLUMNS) * 1.1, _weight(x, COLUMNS).abs() * 1.1
    y = F.batch_norm(x, mean, var, training=True)
    y = F.batch_norm(y * mean, mean, var, training=True, momentum=0.3)
    return torch.cat([y, mean[None], var[None]])


def _cell(x: Tensor) -> Tensor:
    """A recurrent cell: its gates are parts of one storage, by an operation whose schema does not say so."""
    return torch.gru_cell(x, x[:, :4] * 0.7, _weight(x, 12, COLUMNS), _weight(x, 12, 4), _weight(x, 12), None)


def _lists(x: Tensor) -> Tensor:
    """Operations on lists, in place and not, with one number, one each, or tensors."""
    a = [x * 1.1, x[:2] * 0.9]
    torch._foreach_lerp_(a, [x * x, x[2:4]], 0.1)
    torch._foreach_mul_(a, [0.3, 1.7])
    torch._foreach_addcdiv_(a, [x, x[:2]], [x * x + 1, x[:2] * x[:2] + 1], -0.1)
    torch._foreach_maximum_(a, -0.3)
    b = torch._foreach_addcmul(a, a, a, [0.7, 0.1])
    norms = torch._foreach_norm(b, 2)
    torch._foreach_add_(b, a, alpha=0.3)
    return torch.cat([*b, torch.stack(list(norms))[:, None].expand(2, COLUMNS)])


def _own_list(x: Tensor) -> Tensor:
    a, b = x * 1.1, x[:2] * 0.9
    _scale_in_place([a, b], x[0])
    return torch.cat([a, b])


@torch.library.custom_op("pytest_fusion_tests::scale_in_place", mutates_args={"values"})
def _scale_in_place(values: list[Tensor], by: Tensor) -> None:
    for value in values:
        value.mul_(by)


def _counted(x: Tensor) -> Tensor:
    return torch.cat([torch.bincount(INDEX, row[:7] * 1.1, 6).to(x.dtype) for row in x])


FUNCTIONS: dict[str, Function] = {
    "rms_norm": lambda x: F.rms_norm(x, (COLUMNS,), _weight(x, COLUMNS), 1e-6),
    "layer_norm": lambda x: F.layer_norm(x, (COLUMNS,), _weight(x, COLUMNS), _weight(x, COLUMNS)),
    "group_norm": lambda x: F.group_norm(x[:, :, None], 4, _weight(x, COLUMNS), _weight(x, COLUMNS)),
    "batch_norm": lambda x: F.batch_norm(x, None, None, _weight(x, COLUMNS), _weight(x, COLUMNS), training=True),
    "softmax": lambda x: x.softmax(-1),
    "softmax of columns, widened": lambda x: F.softmax(x, 0, dtype=_wide(x).dtype),
    "log_softmax": lambda x: x.log_softmax(-1),
    "logsumexp": lambda x: x.logsumexp((0, 1)),
    "cross_entropy": lambda x: F.cross_entropy(x, TARGET),
    "cross_entropy, smoothed sum": lambda x: F.cross_entropy(_wide(x), TARGET, reduction="sum", label_smoothing=0.1),
    "cross_entropy, class weights": lambda x: F.cross_entropy(x, TARGET, weight=_weight(x, COLUMNS).abs()),
    "kl_div": lambda x: F.kl_div(x.log_softmax(-1), _weight(x, ROWS, COLUMNS).softmax(-1), reduction="batchmean"),
    "mse_loss": lambda x: F.mse_loss(x, _weight(x, ROWS, COLUMNS)),
    "gelu": F.gelu,
    "tanh gelu": lambda x: F.gelu(x, approximate="tanh"),
    "gated silu": _gated,
    "glu": F.glu,
    "softplus": F.softplus,
    "logaddexp": lambda x: torch.logaddexp(x, _weight(x, ROWS, COLUMNS)),
    "mish": F.mish,
    "elu": F.elu,
    "hardswish": F.hardswish,
    "logsigmoid": F.logsigmoid,
    "leaky_relu": F.leaky_relu,
    "exp, log, pow": lambda x: x.exp2().log1p() + x.abs().pow(1.7) + x.expm1() + x.erf() + (x * x + 1).log(),
    "roots": lambda x: (x * x + 1).sqrt() * (x * x + 0.1).rsqrt() / (x.abs() + 1),
    "rotary": _rotary,
    "matmul": lambda x: x @ _weight(x, COLUMNS, 5),
    "linear": lambda x: F.linear(x, _weight(x, 5, COLUMNS), _weight(x, 5)),
    "einsum": lambda x: torch.einsum("ij,kj->ik", x, _weight(x, 4, COLUMNS)),
    "batched product": lambda x: torch.baddbmm(x[:, :4, None], x[:, :4, None], x[:, None, :7]),
    "mv and dot": lambda x: (_weight(x, 3, COLUMNS) @ x[0]) * torch.dot(x[1], x[2]),
    "conv1d": lambda x: F.conv1d(x[None], _weight(x, 4, ROWS, 3), _weight(x, 4), padding=1),
    "causal attention": _attention,
    "masked attention": _masked_attention,
    "cumulative": lambda x: x.cumsum(-1) + (1 + 0.1 * x).cumprod(0),
    "logcumsumexp": lambda x: _wide(x).logcumsumexp(-1),
    "moments": lambda x: torch.cat([x.var(-1), x.std(0), x.mean(1), x.amax(0), _wide(x).norm(dim=-1).to(x.dtype)]),
    "var_mean": lambda x: torch.cat(torch.var_mean(x, -1, correction=0)),
    "normalize": lambda x: F.normalize(x, dim=-1),
    "cosine": lambda x: F.cosine_similarity(x, _weight(x, ROWS, COLUMNS)),
    "gather": lambda x: (x * 1.1).gather(1, INDEX[:ROWS, None]),
    "index": lambda x: (x * 1.1)[INDEX],
    "mask index": lambda x: (x * 1.1)[x[:, 0] > 0],
    "embedding": lambda x: F.embedding(INDEX, x * 1.1),
    "index_add": lambda x: torch.zeros_like(x).index_add(0, INDEX, (x * 1.1)[INDEX]),
    "scatter_add": lambda x: torch.zeros_like(x).scatter_add(0, INDEX[:, None].expand(7, COLUMNS), (x * 1.1)[INDEX]),
    "index_put": lambda x: torch.zeros_like(x).index_put((INDEX,), (x * 1.1)[INDEX], accumulate=True),
    "where": lambda x: torch.where(x > 0, x * 1.1, x.exp()).masked_fill(x > 2, 1.5),
    "clamp": lambda x: (x * 3.3).clamp(-1, 1),
    "topk": lambda x: (x * 1.1).topk(3).values,
    "sort": lambda x: (x * 1.1).sort(-1, descending=True).values,
    "moves": lambda x: F.pad((x * 1.1).roll(3, -1).flip(0).repeat(2, 1).tril(), (1, 2)),
    "writes through views": _through_views,
    "in place": lambda x: x.clone().mul_(1.7).add_(x).clamp_(-2, 2).div_(3),
    "out=": lambda x: torch.add(x, x * 1.1, out=torch.empty(0, dtype=x.dtype)),
    "foreach": lambda x: torch._foreach_mul([x, x * 1.1], 0.3)[1],
    "lists": _lists,
    "a list of one's own": _own_list,
    "running statistics": _running,
    "recurrent cell": _cell,
    "sums by index": _counted,
    "embedding, by frequency": lambda x: F.embedding(INDEX, x * 1.1, scale_grad_by_freq=True),
    "vmap and a number": torch.vmap(lambda row: row * 1.1 / (row.sum().abs() / row.shape[0] + 1)),
}


def _input(dtype: torch.dtype) -> Tensor:
    return torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(11)).to(dtype)


def _differentiated(function: Function, x: Tensor) -> list[Tensor]:
    leaf = x.detach().clone().requires_grad_()
    out = function(leaf)
    return list(torch.autograd.grad(out, leaf, _weight(out, *out.shape)))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_oracle_is_the_float64_result(name: str) -> None:
    """Lane 0 of a float32 reference equals the same reference run in float64, far beyond float32's precision."""
    function = FUNCTIONS[name]
    x = _input(torch.float32)

    found = run_lanes(lambda: [function(x)], seed=1)

    expected = function(x.double())
    assert found.outputs[0].native.shape == found.outputs[0].oracle.shape == found.outputs[0].lanes.shape[1:]
    torch.testing.assert_close(found.outputs[0].oracle, expected, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", [name for name in FUNCTIONS if name != "a list of one's own"])
def test_every_rule_takes_its_operation(name: str, dtype: torch.dtype) -> None:
    """No operation of a forward pass falls back, and the lanes scatter about the oracle by no more than rounding."""
    x = _input(dtype)

    found = run_lanes(lambda: [FUNCTIONS[name](x)], seed=2)

    out = found.outputs[0]
    scale = out.oracle.abs().max().clamp_min(1)
    assert found.fallbacks == ()
    assert not found.drawn
    assert bool(((out.lanes - out.oracle).abs() <= scale * 40 * torch.finfo(dtype).eps).all())


NO_GRADIENT = ("out=", "lists", "a list of one's own", "mask index", "in place", "sums by index")


@pytest.mark.parametrize("name", [name for name in FUNCTIONS if name not in NO_GRADIENT])
def test_gradients_are_followed(name: str) -> None:
    """The oracle of a gradient taken inside the reference is the float64 gradient."""
    function = FUNCTIONS[name]
    x = _input(torch.float32)

    found = run_lanes(lambda: _differentiated(function, x), seed=3)

    out = found.outputs[0]
    scale = float(out.oracle.abs().max()) + 1e-3
    error = (out.native.double() - out.oracle).abs().max()
    assert bool(torch.isfinite(out.lanes).all())
    assert float(error) <= 1e-4 * scale
    # Rounding shows in the lanes wherever it shows in the native gradient.
    assert float((out.lanes - out.oracle).abs().max()) >= float(error) / 30 or float(error) < 1e-7 * scale
    torch.testing.assert_close(out.oracle, _differentiated(function, x.double())[0], rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_oracle_of_a_16_bit_reference_and_of_its_gradient(name: str, dtype: torch.dtype) -> None:
    """Lane 0 knows nothing of 16 bits, also where an operation is carried out by ATen's own decomposition."""
    function, x = FUNCTIONS[name], _input(dtype)
    calls: list[Callable[[Tensor], list[Tensor]]] = [lambda x: [function(x)]]
    try:
        _differentiated(function, x)
    except RuntimeError:
        pass  # not differentiable, or not in this dtype
    else:
        calls.append(lambda x: _differentiated(function, x))
    for call in calls:
        try:
            call(x)
        except NotImplementedError:
            continue
        found = run_lanes(lambda call=call: call(x), seed=1)  # type: ignore[misc]
        for output, expected in zip(found.outputs, call(x.double()), strict=True):
            if output.native.is_floating_point():
                scale = float(expected.abs().nan_to_num().max())
                torch.testing.assert_close(output.oracle, expected.double(), rtol=0, atol=1e-6 * scale, equal_nan=True)


_PLACES = torch.arange(64) % 5
COUNTED: dict[str, Function] = {
    "cumprod": lambda hit: (hit + 1).reshape(8, 8).cumprod(-1),
    "cumprod of bools": lambda hit: (hit > 0).cumprod(0),
    "scatter_add": lambda hit: torch.zeros(5, dtype=torch.int64).scatter_add(0, _PLACES, hit),
    "index_add": lambda hit: torch.ones(5, dtype=torch.int64).index_add(0, _PLACES, hit, alpha=3),
    "scatter_reduce, sum": lambda hit: torch.zeros(5, dtype=torch.int64).scatter_reduce(0, _PLACES, hit, "sum"),
    "scatter_reduce, prod": lambda hit: torch.ones(5, dtype=torch.int64).scatter_reduce(0, _PLACES, hit + 1, "prod"),
    "scatter_reduce, amax": lambda hit: torch.zeros(5, dtype=torch.int64).scatter_reduce(0, _PLACES, hit, "amax"),
    "mm": lambda hit: hit.reshape(4, 16) @ _PLACES.reshape(16, 4),
    "bmm": lambda hit: torch.bmm(hit.reshape(2, 2, 16), _PLACES.reshape(2, 16, 2)),
    "addmm": lambda hit: torch.addmm(hit[:4], hit.reshape(4, 16), _PLACES.reshape(16, 4), beta=2, alpha=3),
    "mv": lambda hit: torch.mv(hit.reshape(4, 16), _PLACES[:16]),
    "dot": lambda hit: torch.dot(hit, _PLACES),
}


@pytest.mark.parametrize("name", COUNTED)
def test_whole_numbers_of_a_comparison_are_exact(name: str) -> None:
    """What is counted of a comparison that no rounding decides is the same in every lane: nothing rounds integers."""
    x = _input(torch.float32).flatten()[:1] * 0 + torch.arange(64) / 8
    reference: Function = lambda x: COUNTED[name]((x * x > 2).long())  # noqa: E731
    lanes = run_lanes(lambda: [reference(x)], lanes=24, seed=3).outputs[0]
    exact = reference(x)
    assert torch.equal(lanes.oracle.to(exact.dtype), exact)
    assert all(torch.equal(lane.to(exact.dtype), exact) for lane in lanes.lanes)


def test_a_decomposition_that_makes_nan_is_not_the_reference() -> None:
    """That of `grid_sampler_2d` takes the first element times 0 for those outside; torch leaves them out."""
    x = torch.ones(1, 1, 3, 3)
    x[0, 0, 0, 0] = math.nan
    grid = torch.tensor([0.9, 0.9]).reshape(1, 1, 1, 2)
    (lanes,) = run_lanes(lambda: [F.grid_sample(x, grid, align_corners=False)], seed=0).outputs
    assert bool(lanes.native.isfinite().all())
    assert bool(lanes.oracle.isfinite().all() & lanes.lanes.isfinite().all())
