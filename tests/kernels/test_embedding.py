"""The embedding kernels beyond their specs: a second source of the references, wrong numbers, what is refused."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

from reference_kernels.embedding import (
    dot_interaction,
    dot_interaction_reference,
    embedding_bag,
    embedding_bag_reference,
)
from reference_kernels.embedding.interaction import MOST_VECTORS, _dot_interaction, _dot_interaction_backward
from reference_kernels.embedding.kernel import _embedding_bag, _embedding_bag_backward

SIZES = (7, 1, 30)  # rows of each table


def _bags(features: int = 20, batch: int = 4) -> dict[str, Any]:
    """Tables, indices that repeat, bags of which some are empty, weights; float64 of float32's values."""
    generator = torch.Generator().manual_seed(5)
    lengths = torch.randint(0, 9, (len(SIZES) * batch,), generator=generator)
    lengths[1], lengths[6] = 0, 13
    offsets = F.pad(lengths.cumsum(0), (1, 0))
    per_table = lengths.view(len(SIZES), batch).sum(1).tolist()
    indices = [torch.randint(0, size, (n,), generator=generator) for size, n in zip(SIZES, per_table, strict=True)]
    return {
        "weight": torch.randn(sum(SIZES), features, generator=generator).double(),
        "starts": F.pad(torch.tensor(SIZES).cumsum(0), (1, 0)),
        "indices": torch.cat(indices),
        "offsets": offsets,
        "sample_weights": torch.randn(len(torch.cat(indices)), generator=generator).double(),
    }


def _float(given: dict[str, Any]) -> dict[str, Any]:
    return {name: each.float() if each.is_floating_point() else each for name, each in given.items()}


def _by_table(given: dict[str, Any], mode: str) -> torch.Tensor:
    """torch's own ``embedding_bag``, once for each table; of weighted means, which it has not, the sum divided."""
    starts, offsets, weights = given["starts"].tolist(), given["offsets"], given["sample_weights"]
    batch = (len(offsets) - 1) // (len(starts) - 1)
    found = []
    for table, (top, bottom) in enumerate(itertools.pairwise(starts)):
        own = offsets[table * batch : (table + 1) * batch + 1]
        part = slice(int(own[0]), int(own[-1]))
        out = F.embedding_bag(
            given["indices"][part],
            given["weight"][top:bottom],
            own - own[0],
            mode="sum" if weights is not None else mode,
            per_sample_weights=None if weights is None else weights[part],
            include_last_offset=True,
        )
        if mode == "mean" and weights is not None:
            out = out / own.diff().clamp(min=1)[:, None]
        found.append(out)
    return torch.stack(found, 1)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_the_reference_is_torchs(mode: str, weighted: bool) -> None:
    """In float64 the reference and its gradients are those of ``torch.nn.functional.embedding_bag`` table by table."""
    given = _bags()
    leaves = [given["weight"].requires_grad_(), given["sample_weights"].requires_grad_()][: 1 + weighted]
    if not weighted:
        given["sample_weights"] = None
    wanted = _by_table(given, mode)
    up = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    got = embedding_bag_reference(**given, mode=mode, compute=torch.float64)

    torch.testing.assert_close(got, wanted, rtol=1e-13, atol=1e-14)
    gradients = [torch.autograd.grad(out, leaves, up) for out in (got, wanted)]
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(("mode", "weighted"), [("sum", False), ("sum", True), ("mean", False), ("mean", True)])
def test_the_kernel_is_torchs(mode: str, weighted: bool, dtype: torch.dtype) -> None:
    """Bags and both gradients are torch's in float64 to float32 accuracy; rows that nobody asked for get zeros."""
    given = _bags(features=70)
    if not weighted:
        given["sample_weights"] = None
    exact = {name: each for name, each in given.items() if each is not None}
    mine = _float(exact)
    mine |= {name: mine[name].to(dtype) for name in ("indices", "offsets")}
    names = ["weight", "sample_weights"][: 1 + weighted]
    for each in (exact, mine):
        for name in names:
            each[name].requires_grad_()
    wanted = _by_table(given, mode)

    got = embedding_bag(**mine, mode=mode)  # type: ignore[arg-type]

    torch.testing.assert_close(got.double(), wanted, rtol=1e-5, atol=2e-6)
    up = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(2))
    gradients = torch.autograd.grad(got, [mine[name] for name in names], up)
    right = torch.autograd.grad(wanted, [exact[name] for name in names], up.double())
    torch.testing.assert_close([each.double() for each in gradients], list(right), rtol=1e-5, atol=1e-5)
    unused = torch.ones(sum(SIZES), dtype=torch.bool)
    unused[right[0].abs().sum(1) > 0] = False
    assert unused.any()
    assert not gradients[0][unused].any()


@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_unchecked_numbers_reach_nothing_outside(mode: str) -> None:
    """A bag with a row that does not exist is NaN, its own sample weight's gradient too, and every other is right."""
    given = _float(_bags())
    right = embedding_bag(**given, mode=mode)  # type: ignore[arg-type]
    sample = int(given["offsets"][6])  # of the second table, which has one row
    for wrong in (-1, 1, 2**40):
        indices = given["indices"].clone()
        indices[sample] = wrong
        weight = given["weight"].clone().requires_grad_()
        scales = given["sample_weights"].clone().requires_grad_()

        out = embedding_bag(weight, given["starts"], indices, given["offsets"], scales, mode, checked=False)  # type: ignore[arg-type]

        assert out[2, 1].isnan().all()
        others = torch.ones(out.shape[:2], dtype=torch.bool)
        others[2, 1] = False
        assert torch.equal(out[others], right[others])
        dweight, dscales = torch.autograd.grad(out.sum(), (weight, scales))
        assert dweight.isfinite().all()
        assert dscales.isnan().nonzero().tolist() == [[sample]]


def test_a_row_of_many_samples_has_the_same_gradient_twice() -> None:
    """Samples that share a row are summed in one order: the same bits in every run."""
    given = _float(_bags())
    indices = given["indices"].clone()
    indices[:] = 0  # one row of each table takes all
    runs = []
    for _ in range(2):
        weight = given["weight"].clone().requires_grad_()
        out = embedding_bag(weight, given["starts"], indices, given["offsets"], given["sample_weights"])
        runs.append(torch.autograd.grad(out.square().sum(), weight)[0])
    assert torch.equal(*runs)


def _vectors(batch: int, tables: int, features: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return tuple(
        torch.randn(shape, generator=generator).double() for shape in ((batch, features), (batch, tables, features))
    )  # type: ignore[return-value]


def _by_einsum(dense: torch.Tensor, sparse: torch.Tensor) -> torch.Tensor:
    """Facebook's DLRM as it is written there: the lower triangle by two lists of numbers."""
    vectors = torch.cat((dense, sparse.flatten(1)), 1).view(len(dense), -1, dense.shape[1])
    products = torch.einsum("bif,bjf->bij", vectors, vectors)
    count = vectors.shape[1]
    first = [i for i in range(count) for j in range(i)]
    second = [j for i in range(count) for j in range(i)]
    return torch.cat((dense, products[:, first, second]), 1)


@pytest.mark.parametrize(("tables", "features"), [(3, 8), (26, 20), (40, 100), (0, 5), (1, 1)])
def test_the_interaction_is_dlrms(tables: int, features: int) -> None:
    """Reference and kernel, and their gradients, are DLRM's lists of pairs: in float64, and to float32 accuracy."""
    dense, sparse = (each.requires_grad_() for each in _vectors(5, tables, features))
    wanted = _by_einsum(dense, sparse)
    up = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(4))
    right = torch.autograd.grad(wanted, (dense, sparse), up.double(), allow_unused=True)
    mine = [each.detach().float().requires_grad_() for each in (dense, sparse)]

    reference = dot_interaction_reference(dense, sparse, torch.float64)
    got = dot_interaction(*mine)

    torch.testing.assert_close(reference, wanted, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(got.double(), wanted, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(torch.autograd.grad(reference, (dense, sparse), up.double()), right)
    gradients = torch.autograd.grad(got, mine, up)
    torch.testing.assert_close([each.double() for each in gradients], list(right), rtol=1e-5, atol=1e-5)


def test_the_most_tables() -> None:
    """128 vectors of a sample are one tile."""
    dense, sparse = _vectors(2, MOST_VECTORS - 1, 16)
    got = dot_interaction(dense.float(), sparse.float())
    torch.testing.assert_close(got.double(), _by_einsum(dense, sparse), rtol=1e-5, atol=1e-5)


def test_nan_stays_within_its_pairs() -> None:
    """A vector with NaN poisons its own pairs alone, of its own sample."""
    dense, sparse = (each.float() for each in _vectors(2, 3, 5))
    sparse[1, 0, 2] = torch.nan
    out = dot_interaction(dense, sparse)
    assert out.isnan().nonzero().tolist() == [[1, 5], [1, 7], [1, 9]]  # (1, 0), (2, 1), (3, 1)


@pytest.mark.slow
def test_opcheck() -> None:
    """Schema, fake kernels, autograd registration and tracing hold, strided and empty inputs included."""
    given = _float(_bags())
    weight = given["weight"].t().contiguous().t().requires_grad_()
    rest = given["starts"], given["indices"], given["offsets"]
    torch.library.opcheck(_embedding_bag, (weight, *rest, given["sample_weights"].requires_grad_(), True, True))
    torch.library.opcheck(
        _embedding_bag, (torch.empty(0, 20), rest[0] * 0, rest[1][:0], rest[2] * 0, None, False, False)
    )
    up = torch.ones(4, 3, 20)
    for asked in ((True, False), (False, True)):
        plain = weight.detach(), *rest, given["sample_weights"].detach()
        torch.library.opcheck(_embedding_bag_backward, (up, *plain, False, *asked))
    dense, sparse = (each.float().requires_grad_() for each in _vectors(4, 3, 6))
    torch.library.opcheck(_dot_interaction, (dense, sparse))
    torch.library.opcheck(_dot_interaction_backward, (torch.ones(4, 12), dense.detach(), sparse.detach()))


@pytest.mark.slow
def test_one_graph() -> None:
    """Bags into interaction, and the gradients, compile without a graph break."""
    given = _float(_bags())
    weight, scales = given["weight"].requires_grad_(), given["sample_weights"].requires_grad_()
    dense = torch.randn(4, 20, requires_grad=True)

    def plain(dense: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        bags = embedding_bag(weight, given["starts"], given["indices"], given["offsets"], scales, checked=False)
        return dot_interaction(dense, bags).square()

    whole = torch.compile(plain, fullgraph=True, backend="aot_eager")(dense, weight, scales)

    wanted = plain(dense, weight, scales)
    torch.testing.assert_close(whole, wanted, rtol=0, atol=0)
    got, right = (torch.autograd.grad(out.sum(), (dense, weight, scales)) for out in (whole, wanted))
    torch.testing.assert_close(got, right, rtol=0, atol=0)


def test_a_second_derivative_is_refused() -> None:
    """The backward kernels have no gradient of their own, and say so instead of leaving a term out."""
    given = _float(_bags())
    scales = given["sample_weights"].requires_grad_()
    dense, sparse = (each.float().requires_grad_() for each in _vectors(2, 3, 4))
    for out, leaf in ((embedding_bag(**given), scales), (dot_interaction(dense, sparse), dense)):
        (first,) = torch.autograd.grad(out.square().sum(), leaf, create_graph=True)
        with pytest.raises(RuntimeError, match="no autograd formula was registered"):
            torch.autograd.grad(first.square().sum(), leaf)


def test_sizes_of_zero() -> None:
    """No samples give zeros, no bags or features nothing, tables without rows and a sample without pairs are fine."""
    weight = torch.ones(3, 4, requires_grad=True)
    none = torch.empty(0, dtype=torch.int64)
    out = embedding_bag(weight, torch.tensor([0, 0, 3]), none, torch.zeros(7, dtype=torch.int64), mode="mean")
    assert torch.equal(out, torch.zeros(3, 2, 4))
    assert torch.equal(torch.autograd.grad(out.sum(), weight)[0], torch.zeros(3, 4))
    empty = embedding_bag(weight, torch.tensor([0, 0, 3]), none, torch.tensor([0]))
    assert empty.shape == (0, 2, 4)
    assert torch.equal(torch.autograd.grad(empty.sum(), weight)[0], torch.zeros(3, 4))
    narrow = embedding_bag(torch.ones(3, 0), torch.tensor([0, 3]), torch.tensor([1]), torch.tensor([0, 1]))
    assert narrow.shape == (1, 1, 0)

    for batch, tables, features in ((0, 3, 4), (2, 0, 4), (2, 3, 0), (2, 0, 0)):
        dense = torch.ones(batch, features, requires_grad=True)
        sparse = torch.ones(batch, tables, features, requires_grad=True)
        found = dot_interaction(dense, sparse)
        assert torch.equal(found, dot_interaction_reference(dense, sparse))
        gradients = torch.autograd.grad(found.sum(), (dense, sparse))
        assert [each.shape for each in gradients] == [dense.shape, sparse.shape]


@pytest.mark.parametrize(
    ("error", "words", "change"),
    [
        (TypeError, "weight is float64, allowed: float32", lambda g: {"weight": g["weight"].double()}),
        (TypeError, "starts is int32, allowed: int64", lambda g: {"starts": g["starts"].int()}),
        (TypeError, "indices is float32", lambda g: {"indices": g["indices"].float()}),
        (TypeError, "offsets is int16", lambda g: {"offsets": g["offsets"].short()}),
        (TypeError, "sample_weights is int64", lambda g: {"sample_weights": g["indices"]}),
        (ValueError, "mode is 'max', known: sum, mean", lambda g: {"mode": "max"}),
        (ValueError, "weight has shape", lambda g: {"weight": g["weight"][0]}),
        (ValueError, r"starts has shape \(1,\)", lambda g: {"starts": g["starts"][:1]}),
        (ValueError, r"offsets has shape \(0,\)", lambda g: {"offsets": g["offsets"][:0]}),
        (ValueError, "indices has shape", lambda g: {"indices": g["indices"][None]}),
        (ValueError, "11 bags are no multiple of 3 tables", lambda g: {"offsets": g["offsets"][1:]}),
        (ValueError, "sample_weights has shape", lambda g: {"sample_weights": g["sample_weights"][1:]}),
        (ValueError, "indices is on meta", lambda g: {"indices": g["indices"].to("meta")}),
        (ValueError, r"indices\[0\] is 7, but table 0 has 7 rows", lambda g: {"indices": _set(g["indices"], 7)}),
        (ValueError, r"indices\[0\] is -1", lambda g: {"indices": _set(g["indices"], -1)}),
        (ValueError, "starts must rise from 0 to the 38 rows", lambda g: {"starts": g["starts"] + 1}),
        (ValueError, "starts must rise", lambda g: {"starts": g["starts"][[0, 2, 1, 3]]}),
        (ValueError, "offsets must rise", lambda g: {"offsets": g["offsets"] + 1}),
        (ValueError, "they go from", lambda g: {"offsets": g["offsets"].roll(1)}),
    ],
)
def test_what_is_refused(
    error: type[Exception], words: str, change: Callable[[dict[str, Any]], dict[str, Any]]
) -> None:
    """What the kernel does not support is refused in words, before anything is launched."""
    given = _float(_bags())
    with pytest.raises(error, match=words):
        embedding_bag(**{**given, **change(given)})


def _set(indices: torch.Tensor, first: int) -> torch.Tensor:
    found = indices.clone()
    found[0] = first
    return found


@pytest.mark.parametrize(
    ("error", "words", "call"),
    [
        (TypeError, "dense is float64", lambda d, s: dot_interaction(d.double(), s)),
        (TypeError, "sparse is float16, allowed: float32", lambda d, s: dot_interaction(d, s.half())),
        (ValueError, r"sparse \(1, 4\) do not fit", lambda d, s: dot_interaction(d, s[0])),
        (ValueError, r"dense \(1, 4\)", lambda d, s: dot_interaction(d[:1], s)),
        (ValueError, r"sparse \(2, 1, 2\) do not fit", lambda d, s: dot_interaction(d, s[..., :2])),
        (
            ValueError,
            "there are 128 tables, supported: up to 127",
            lambda d, s: dot_interaction(d, s.expand(2, 128, 4)),
        ),
        (ValueError, "sparse is on meta", lambda d, s: dot_interaction(d, s.to("meta"))),
    ],
)
def test_what_the_interaction_refuses(error: type[Exception], words: str, call: Callable[..., object]) -> None:
    """Shapes and dtypes that do not fit are refused in words."""
    with pytest.raises(error, match=words):
        call(torch.ones(2, 4), torch.ones(2, 1, 4))
