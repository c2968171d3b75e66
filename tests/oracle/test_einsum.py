"""``torch.einsum`` under the lanes: the products that it is, where a dim that it sums over has one element too."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from pytest_fusion.oracle.shadow import Contracting
from tests.oracle.tolerance.judging import judged

# Those that are made products where ``k`` has one element, and others, which stay as they are.
PRODUCTS = ("bnk,bke->bne", "nk,ek->en", "k,k->", "nk,ke", "bhnk,bhmk->bhnm", "nk,nk->n", "kj,jk->")
OTHERS = ("nk,nk->nk", "n,e->ne", "...k,ke->...e", "nk,e->ne", "kkn,ke->ne", "nkj,ke->ne")


@pytest.mark.parametrize("equation", PRODUCTS + OTHERS)
def test_the_result_is_that_of_einsum(equation: str) -> None:
    """Whichever dims have one element, for tensors that were transposed too."""
    generator = torch.Generator().manual_seed(3)
    letters = sorted(set(filter(str.isalpha, equation)))
    for chosen in itertools.product((1, 3), repeat=len(letters)):
        sizes = dict(zip(letters, chosen, strict=True))
        a, b = (
            torch.randn([sizes[n] for n in reversed(part) if n.isalpha()], generator=generator)
            for part in equation.partition("->")[0].split(",")
        )
        a, b = a.permute(*range(a.dim())[::-1]), b.permute(*range(b.dim())[::-1])
        expected = torch.einsum(equation, a, b)
        with Contracting():
            found = torch.einsum(equation, a, b), torch.einsum(equation, [a, b])
        for made in found:
            torch.testing.assert_close(made, expected)


def weights(q: Tensor, k: Tensor) -> Tensor:
    return torch.einsum("nd,md->nm", q.float(), k.float()).exp()


@pytest.mark.parametrize("keys", [1, 5])
def test_a_factor_may_be_kept_in_16_bits_whatever_the_length(keys: int) -> None:
    """Of one key as of several: of one, ATen only multiplies, and the lanes had no product to feed."""
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(rows, 7, generator=generator).bfloat16() for rows in (9, keys, keys))

    def attended(once: float = 0) -> Tensor:
        p = weights(q, k)
        return torch.einsum("nm,me->ne", (p * once).bfloat16().float() if once else p, v.float()).bfloat16()

    assert judged(attended(1.0), attended).ok
    assert not judged(attended(1.02), attended).ok
    assert not judged((attended().float() * 1.02).bfloat16(), attended).ok


@pytest.mark.parametrize("keys", [1, 5])
def test_so_may_the_factor_of_a_gradient(keys: int) -> None:
    """The gradient of one value is the weight, in 16 bits, times what comes from above."""
    generator = torch.Generator().manual_seed(1)
    q, k, v, up = (torch.randn(rows, 7, generator=generator).bfloat16() for rows in (9, keys, keys, 9))

    def gradient() -> Tensor:
        leaf = v.detach().requires_grad_()
        out = torch.einsum("nm,me->ne", weights(q, k), leaf.float()).bfloat16()
        return torch.autograd.grad(out, leaf, up)[0]

    made = weights(q, k).bfloat16().float().T @ up.float()
    assert judged(made.bfloat16(), gradient).ok
    assert not judged((made * 1.02).bfloat16(), gradient).ok
