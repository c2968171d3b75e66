"""cross_entropy and layer_norm of the reference suite at the sizes of a model, which no search draws."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [128256, 50257])
def test_cross_entropy_of_a_whole_vocabulary(vocab: int, dtype: torch.dtype) -> None:
    """Loss and gradient over a vocabulary, aligned or odd, are those of torch in float64, ignored rows included."""
    from reference_kernels.cross_entropy import cross_entropy

    logits = torch.randn(300, vocab, device="cuda").mul_(3).to(dtype).requires_grad_()
    target = torch.randint(vocab, (300,), device="cuda")
    target[::7] = -100
    exact = logits.detach().double().requires_grad_()

    loss = cross_entropy(logits, target, label_smoothing=0.1)
    wanted = F.cross_entropy(exact, target, label_smoothing=0.1)
    (d,), (right,) = torch.autograd.grad(loss, logits), torch.autograd.grad(wanted, exact)

    torch.testing.assert_close(loss.double(), wanted, rtol=2e-6, atol=0)
    unit = {torch.float32: 2e-5, torch.bfloat16: 2**-8 + 2e-5}[dtype]
    torch.testing.assert_close(d.double(), right, rtol=unit, atol=1e-12)


def test_cross_entropy_past_31_bits() -> None:
    """Rows whose elements lie past 2**31 have the loss and gradient of the same rows alone, bit for bit."""
    from reference_kernels.cross_entropy import cross_entropy

    rows, vocab = 16500, 131072
    if torch.cuda.mem_get_info()[0] < 20 * 2**30:
        pytest.skip("needs 20 GiB")
    logits = torch.randn(rows, vocab, device="cuda", dtype=torch.bfloat16).requires_grad_()
    target = torch.randint(vocab, (rows,), device="cuda")

    loss = cross_entropy(logits, target, reduction="none")
    (d,) = torch.autograd.grad(loss.sum(), logits)

    for part in (slice(0, 4), slice(rows - 4, rows)):
        few = logits.detach()[part].clone().requires_grad_()
        alone = cross_entropy(few, target[part], reduction="none")
        assert torch.equal(loss[part], alone)
        assert torch.equal(d[part], torch.autograd.grad(alone.sum(), few)[0])


def test_labels_out_of_range_do_not_stop_the_device() -> None:
    """A wrong label makes its row NaN, and the next launch still works."""
    from reference_kernels.cross_entropy import cross_entropy

    logits = torch.randn(4, 1000, device="cuda", requires_grad=True)
    target = torch.tensor([1, 1000, -1, 2**62], device="cuda")

    loss = cross_entropy(logits, target, reduction="none")
    (d,) = torch.autograd.grad(loss.sum(), logits)

    assert loss.isnan().tolist() == [False, True, True, True]
    assert d.isnan().all(-1).tolist() == [False, True, True, True]
    torch.cuda.synchronize()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "width"), [(16384, 8192), (20000, 1000), (700, 65536), (3, 16384)])
def test_layer_norm_of_many_rows(rows: int, width: int, dtype: torch.dtype) -> None:
    """Results and gradients, summed over all rows of a batch, are torch's in float64, and the same bits every time."""
    from reference_kernels.layer_norm import layer_norm

    x, dy = (torch.randn(rows, width, device="cuda").to(dtype) for _ in range(2))
    leaves = [x.requires_grad_(), *(torch.randn(width, device="cuda").to(dtype).requires_grad_() for _ in range(2))]
    exact = [t.detach().double().requires_grad_() for t in leaves]
    wanted = F.layer_norm(exact[0], (width,), exact[1], exact[2])
    gradients = torch.autograd.grad(wanted, exact, dy.double())

    y = layer_norm(leaves[0], leaves[1], leaves[2])
    got = torch.autograd.grad(y, leaves, dy, retain_graph=True)

    unit = {torch.float32: 2e-5, torch.bfloat16: 2**-8 + 2e-5}[dtype]
    torch.testing.assert_close(y.double(), wanted, rtol=unit, atol=2e-5)
    torch.testing.assert_close(got[0].double(), gradients[0], rtol=unit, atol=2e-5)
    for d, right in zip(got[1:], gradients[1:], strict=True):
        torch.testing.assert_close(d.double(), right, rtol=unit, atol=1e-5 * rows**0.5)
    assert all(torch.equal(a, b) for a, b in zip(got, torch.autograd.grad(y, leaves, dy), strict=True))
