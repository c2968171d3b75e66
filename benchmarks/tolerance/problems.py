"""Random problems: a reference, its inputs, kernels that are right and kernels that are wrong in a known way.

Eight families, 1-64 rows, 2-2048 columns (log-uniform), scales 1e-3..8, an offset of 8 deviations in a quarter of
them, a zero row in a tenth. Kernels are float32 inside with one rounding at the end, except where the bug is in that.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.tolerance.sums import (
    as_tf32,
    blocked_product,
    blocked_sum,
    low_precision,
    online_sum_of_exponentials,
    strict_sum,
    welford,
)

RMS_EPS, LAYER_EPS, IGNORE = 1e-6, 1e-5, -100


@dataclass(frozen=True, slots=True)
class Problem:
    """``reference(*inputs)`` and the results of right and wrong kernels, by name.

    ``eager`` are results of honest kernels that round in 16 bits where eager PyTorch does: less accurate, not wrong.
    """

    reference: Callable[..., Tensor]
    inputs: tuple[Tensor, ...]
    right: dict[str, Tensor]
    wrong: dict[str, Tensor]
    eager: dict[str, Tensor] = field(default_factory=dict)


@dataclass(slots=True)
class Draw:
    """The random choices of one problem."""

    choice: random.Random
    generator: torch.Generator
    dtype: torch.dtype

    @classmethod
    def seeded(cls, seed: int, dtype: torch.dtype) -> Draw:
        return cls(random.Random(seed), torch.Generator().manual_seed(seed), dtype)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator)

    def columns(self, low: int = 2, high: int = 2048) -> int:
        return round(math.exp(self.choice.uniform(math.log(low), math.log(high))))

    def rows(self, high: int = 48) -> int:
        return self.choice.randint(1, high)

    def table(
        self,
        rows: int,
        columns: int,
        scales: Sequence[float] = (1e-3, 1e-2, 1.0, 1.0, 8.0),
        offsets: Sequence[float] = (0.0, 0.0, 0.0, 8.0),
    ) -> Tensor:
        scale, offset = self.choice.choice(scales), self.choice.choice(offsets)
        x = (self.normal(rows, columns) + offset) * scale
        if self.choice.random() < 0.1:
            x[self.choice.randrange(rows)] = 0
        return x.to(self.dtype)


def softmax(draw: Draw) -> Problem:
    dtype, low = draw.dtype, low_precision(draw.dtype)
    x = draw.table(draw.rows(), draw.columns(), scales=(0.01, 1.0, 1.0, 4.0))
    wide = x.float()
    top = wide.amax(-1, True)
    grown = (wide - top).exp()
    total = grown.sum(-1, True)
    online_top, online_total = online_sum_of_exponentials(wide, 128)
    twos = torch.exp2((wide - top) * 1.4426950408889634)
    right = {
        "sequential": grown / strict_sum(grown)[:, None],
        "online": (wide - online_top).exp() / online_total,
        "reversed": grown * (1 / blocked_sum(grown.flip(-1))[:, None]),
        "exp2": twos / twos.sum(-1, True),
    }
    wrong = {
        "low-precision sum": grown / blocked_sum(grown, low)[:, None],
        "tail dropped": grown / grown[:, :-1].sum(-1, True),
        "exp stored low": grown.to(low).float() / total,
        "padding counted": grown / (total + (0 - top).exp()),
    }
    stored = grown.to(dtype)
    eager = {"exponential in 16 bits": stored / stored.float().sum(-1, True).to(dtype)}
    return Problem(
        lambda x: torch.softmax(x, -1), (x,), _stored(right, dtype), _stored(wrong, dtype), _low(eager, dtype)
    )


def causal_softmax(draw: Draw) -> Problem:
    dtype, low = draw.dtype, low_precision(draw.dtype)
    n = draw.columns(4, 256)
    x = draw.table(n, n, scales=(0.01, 1.0, 4.0), offsets=(0.0,))
    wide = x.float()
    hidden = torch.ones(n, n, dtype=torch.bool).triu(1)
    last = hidden.clone()
    last[-1, -1] = True

    def masked(mask: Tensor) -> Tensor:
        return torch.softmax(wide.masked_fill(mask, -math.inf), -1)

    seen = wide.masked_fill(hidden, -math.inf)
    grown = (seen - seen.amax(-1, True)).exp()
    right = {"blocked": grown / blocked_sum(grown)[:, None], "sequential": grown / strict_sum(grown)[:, None]}
    wrong = {
        "mask off by one": masked(torch.ones(n, n, dtype=torch.bool).triu(2)),
        "last token masked": masked(last),
        "low-precision sum": grown / blocked_sum(grown, low)[:, None],
    }

    def reference(x: Tensor) -> Tensor:
        return torch.softmax(x.masked_fill(hidden, -math.inf), -1)

    return Problem(reference, (x,), _stored(right, dtype), _stored(wrong, dtype))


def _rms_norm(draw: Draw, upcast: bool) -> Problem:
    dtype, low = draw.dtype, low_precision(draw.dtype)
    n = draw.columns()
    x = draw.table(draw.rows(), n)
    weight = (1 + 0.2 * draw.normal(n)).to(dtype)
    wide, w = x.float(), weight.float()
    squares = wide * wide
    mean = squares.mean(-1)

    def reference(x: Tensor, weight: Tensor) -> Tensor:
        xf = x.float()
        normed = xf * torch.rsqrt(xf.pow(2).mean(-1, keepdim=True) + RMS_EPS)
        return (normed * weight.float()).to(x.dtype) if upcast else weight * normed.to(x.dtype)

    def finish(second: Tensor, eps: float = RMS_EPS) -> Tensor:
        return wide * torch.rsqrt(second[:, None] + eps) * w

    right = {
        "sequential": finish(strict_sum(squares) / n),
        "blocked": finish(blocked_sum(squares) / n),
        "square root and division": wide / torch.sqrt(blocked_sum(squares.flip(-1))[:, None] / n + RMS_EPS) * w,
        "weight first": (wide * w) * torch.rsqrt(mean[:, None] + RMS_EPS),
    }
    wrong = {
        "missing eps": finish(mean, 0.0),
        "eps 1e-5": finish(mean, 1e-5),
        "eps outside the root": wide / (mean.sqrt()[:, None] + RMS_EPS) * w,
        "low-precision sum": finish(blocked_sum(squares, low) / n),
        "tail dropped": finish(squares[:, :-1].sum(-1) / n),
        "n - 1": finish(squares.sum(-1) / max(n - 1, 1)),
    }
    if upcast:
        wrong["cast before weight"] = (wide * torch.rsqrt(mean[:, None] + RMS_EPS)).to(low).float() * w
    else:
        root = torch.rsqrt(blocked_sum(squares)[:, None] / n + RMS_EPS)
        right["cast as the reference"] = w * (wide * root).to(dtype).float()
    eager = {
        "cast before weight": (wide * torch.rsqrt(mean[:, None] + RMS_EPS)).to(dtype) * weight,
        "root in 16 bits": x * torch.rsqrt(mean + RMS_EPS).to(dtype)[:, None] * weight,
        "divided by a root in 16 bits": x / (mean + RMS_EPS).sqrt().to(dtype)[:, None] * weight,
    }
    return Problem(reference, (x, weight), _stored(right, dtype), _stored(wrong, dtype), _low(eager, dtype))


def rms_norm(draw: Draw) -> Problem:
    return _rms_norm(draw, upcast=True)


def rms_norm_hf(draw: Draw) -> Problem:
    """The Hugging Face form: cast to the input's dtype before the weight is applied."""
    return _rms_norm(draw, upcast=False)


def layer_norm(draw: Draw) -> Problem:
    dtype, low = draw.dtype, low_precision(draw.dtype)
    n = draw.columns(4)
    x = draw.table(draw.rows(), n)
    weight, bias = (1 + 0.2 * draw.normal(n)).to(dtype), (0.2 * draw.normal(n)).to(dtype)
    wide, w, b = x.float(), weight.float(), bias.float()

    def finish(mean: Tensor, variance: Tensor, eps: float = LAYER_EPS) -> Tensor:
        return (wide - mean[:, None]) * torch.rsqrt(variance[:, None] + eps) * w + b

    def squared(mean: Tensor) -> Tensor:
        return (wide - mean[:, None]).square()

    mean = wide.mean(-1)
    second = squared(mean).mean(-1)
    blocked, strict, coarse = blocked_sum(wide) / n, strict_sum(wide) / n, blocked_sum(wide, low) / n
    normed = (wide - mean[:, None]) * torch.rsqrt(second[:, None] + LAYER_EPS)
    merged_mean, merged = welford(wide, 64)
    right = {
        "two passes, blocked": finish(blocked, blocked_sum(squared(blocked)) / n),
        "two passes, sequential": finish(strict, strict_sum(squared(strict)) / n),
        "Welford": finish(merged_mean, merged / n),
    }
    wrong = {
        "missing eps": finish(mean, second, 0.0),
        "eps 1e-6": finish(mean, second, 1e-6),
        "eps outside the root": (wide - mean[:, None]) / (second.sqrt()[:, None] + LAYER_EPS) * w + b,
        "n - 1": finish(mean, squared(mean).sum(-1) / (n - 1)),
        "low-precision sum": finish(coarse, blocked_sum(squared(coarse), low) / n),
        "tail dropped": finish(wide[:, :-1].sum(-1) / n, second),
        "cast before weight": normed.to(low).float() * w + b,
    }

    def reference(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.layer_norm(x, (n,), weight, bias, LAYER_EPS)

    eager = {"cast before weight": normed.to(dtype) * weight + bias, "cast before bias": (normed * w).to(dtype) + bias}
    return Problem(reference, (x, weight, bias), _stored(right, dtype), _stored(wrong, dtype), _low(eager, dtype))


def matmul_bias_gelu(draw: Draw) -> Problem:
    dtype, low = draw.dtype, low_precision(draw.dtype)
    m, n, k = draw.choice.randint(1, 64), draw.choice.randint(1, 64), draw.columns(8)
    x = draw.table(m, k, scales=(0.1, 1.0, 1.0), offsets=(0.0, 0.0, 1.0))
    weight = (draw.normal(k, n) / math.sqrt(k)).to(dtype)
    bias = draw.normal(n).to(dtype)
    a, w, b = x.float(), weight.float(), bias.float()
    carried = b.expand(m, n)
    for start in range(0, k, 8):
        carried = carried + a[:, start : start + 8] @ w[start : start + 8]
    short = b.clone()
    short[-1] = 0
    right = {
        "float32": F.gelu(a @ w + b),
        "blocks of 32": F.gelu(blocked_product(a, w, 32) + b),
        "K reversed": F.gelu(blocked_product(a, w, 16, backwards=True) + b),
        "split K": F.gelu(a[:, ::2] @ w[::2] + a[:, 1::2] @ w[1::2] + b),
        "bias first": F.gelu(carried),
    }
    wrong = {
        "low-precision sum": F.gelu(blocked_product(a, w, 16, low) + b),
        "tail dropped": F.gelu(a[:, :-1] @ w[:-1] + b),
        "tanh GELU": F.gelu(a @ w + b, approximate="tanh"),
        "last bias missing": F.gelu(a @ w + short),
    }
    if dtype == torch.float32:
        wrong["TF32"] = F.gelu(as_tf32(a) @ as_tf32(w) + b)

    def reference(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.gelu(torch.mm(x, weight) + bias)

    product = (a @ w).to(dtype)
    eager = {
        "product in 16 bits": F.gelu((product + bias).float()),
    }
    return Problem(reference, (x, weight, bias), _stored(right, dtype), _stored(wrong, dtype), _low(eager, dtype))


def _cross_entropy(draw: Draw, reduction: str) -> Problem:
    low = low_precision(draw.dtype)
    rows, classes = draw.rows(64), draw.columns(4)
    x = draw.table(rows, classes, scales=(0.1, 1.0, 4.0), offsets=(0.0,))
    target = torch.randint(0, classes, (rows,), generator=draw.generator)
    if rows > 2:
        target[draw.choice.randrange(rows)] = IGNORE
    wide = x.float()
    valid, safe = target != IGNORE, target.clamp_min(0)

    def finish(lse: Tensor, chosen: Tensor = safe, kept: Tensor = valid) -> Tensor:
        loss = torch.where(kept, lse - wide.gather(1, chosen[:, None])[:, 0], 0.0)
        return loss if reduction == "none" else loss.sum() / kept.sum()

    top = wide.amax(-1)
    grown = (wide - top[:, None]).exp()
    lse = top + grown.sum(-1).log()
    online_top, online_total = online_sum_of_exponentials(wide, 64)
    right = {
        "online": finish((online_top + online_total.log())[:, 0]),
        "sequential": finish(top + strict_sum(grown).log()),
        "reversed": finish(top + blocked_sum(grown.flip(-1)).log()),
    }
    wrong = {
        "low-precision sum": finish(top + blocked_sum(grown, low).log()),
        "tail dropped": finish(top + grown[:, :-1].sum(-1).log()),
        "log-sum stored low": finish(lse.to(low).float()),
        "label off by one": finish(lse, (safe + 1).clamp_max(classes - 1)),
    }
    if rows > 2:
        wrong["ignored rows counted"] = finish(lse, safe, torch.ones_like(valid))

    def reference(x: Tensor) -> Tensor:
        return F.cross_entropy(x.float(), target, ignore_index=IGNORE, reduction=reduction)

    return Problem(reference, (x,), right, wrong)


def cross_entropy(draw: Draw) -> Problem:
    return _cross_entropy(draw, "none")


def cross_entropy_mean(draw: Draw) -> Problem:
    return _cross_entropy(draw, "mean")


def _low(results: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    return _stored(results, dtype) if dtype.itemsize == 2 else {}


def _stored(results: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    return {name: value.to(dtype) for name, value in results.items()}


FAMILIES: dict[str, Callable[[Draw], Problem]] = {
    "softmax": softmax,
    "causal softmax": causal_softmax,
    "rms_norm": rms_norm,
    "rms_norm, HF": rms_norm_hf,
    "layer_norm": layer_norm,
    "matmul+bias+gelu": matmul_bias_gelu,
    "cross_entropy": cross_entropy,
    "cross_entropy, mean": cross_entropy_mean,
}
