"""cross_entropy, softmax and the norms of the reference suite at the sizes of a model, which no search draws."""

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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "width"), [(16384, 8192), (20000, 1000), (700, 65536), (3, 16384)])
@pytest.mark.parametrize("convention", ["gemma", "torch"])
def test_rms_norm_of_many_rows(convention: str, rows: int, width: int, dtype: torch.dtype) -> None:
    """Results and gradients with a residual, summed over all rows, are torch's in float64, with the same bits again."""
    from reference_kernels.rms_norm import add_rms_norm

    x, residual, dy, dtotal = (torch.randn(rows, width, device="cuda").to(dtype) for _ in range(4))
    leaves = [t.requires_grad_() for t in (x, residual, torch.randn(width, device="cuda").to(dtype))]
    total = (x + residual).detach()
    exact = [total.double().requires_grad_(), leaves[2].detach().double().requires_grad_()]
    wanted = F.rms_norm(exact[0], (width,), exact[1] + (convention == "gemma"), 1e-6)
    gradients = torch.autograd.grad((wanted, exact[0] * 1), exact, (dy.double(), dtotal.double()))

    y, summed = add_rms_norm(x, residual, leaves[2], 1e-6, convention)  # type: ignore[arg-type]
    got = torch.autograd.grad((y, summed), leaves, (dy, dtotal), retain_graph=True)

    unit = {torch.float32: 2e-5, torch.bfloat16: 2**-8 + 2e-5}[dtype]
    assert torch.equal(summed, total)
    torch.testing.assert_close(y.double(), wanted, rtol=unit, atol=2e-5)
    torch.testing.assert_close(got[0].double(), gradients[0], rtol=unit, atol=2e-5)
    assert torch.equal(got[0], got[1])
    torch.testing.assert_close(got[2].double(), gradients[1], rtol=unit, atol=1e-5 * rows**0.5)
    again = torch.autograd.grad((y, summed), leaves, (dy, dtotal))
    assert all(torch.equal(a, b) for a, b in zip(got, again, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "width"), [(2048, 8192), (8192, 1000), (300, 131072)])
def test_softmax_of_wide_rows(rows: int, width: int, dtype: torch.dtype) -> None:
    """Results and the gradients of input and bias, rows in registers and past them, are torch's in float64."""
    from reference_kernels.softmax import softmax

    torch.manual_seed(width)
    x, dy = (torch.randn(rows, width, device="cuda").mul_(3).to(dtype) for _ in range(2))
    leaves = [x.requires_grad_(), torch.randn(width, device="cuda").to(dtype).requires_grad_()]
    exact = [t.detach().double().requires_grad_() for t in leaves]
    wanted = torch.softmax(exact[0] * 0.5 + exact[1], -1)
    gradients = torch.autograd.grad(wanted, exact, dy.double())

    y = softmax(x, 0.5, bias=leaves[1])
    got = torch.autograd.grad(y, leaves, dy, retain_graph=True)

    unit = {torch.float32: 2e-5, torch.bfloat16: 2**-8 + 2e-5}[dtype]
    torch.testing.assert_close(y.double(), wanted, rtol=unit, atol=1e-9)
    # `dy - sum(dy * y)` may cancel, to nothing of its terms of up to 15: what is left is multiplied by `y`.
    torch.testing.assert_close(got[0].double(), gradients[0], rtol=unit, atol=1e-7)
    # A sum of up to 8,192 rows that cancels to a thousandth of its terms.
    torch.testing.assert_close(got[1].double(), gradients[1], rtol=unit, atol=1e-5)
    assert all(torch.equal(a, b) for a, b in zip(got, torch.autograd.grad(y, leaves, dy), strict=True))


@pytest.mark.parametrize("p", [0.0, 0.1])
def test_softmax_of_attention_scores(p: float) -> None:
    """Scores of many heads below a diagonal, with padding, a bias for each head and dropout: results and gradients."""
    from reference_kernels.softmax import softmax, softmax_reference

    x, dy = (torch.randn(3, 8, 256, 512, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    bias = torch.randn(8, 256, 512, device="cuda", dtype=torch.bfloat16)
    keep = torch.rand(3, 1, 1, 512, device="cuda") < 0.8
    keep[..., 0] = True
    mask = softmax(torch.ones(3 * 8 * 256, 512, device="cuda"), dropout_p=p, seed=11).view(x.shape) != 0
    assert abs(mask.float().mean().item() - (1 - p)) < 1e-3
    exact = [t.double().requires_grad_() for t in (x, bias)]
    wanted = softmax_reference(exact[0], 0.3, keep, exact[1], 256, p, 11, mask, torch.float64)
    gradients = torch.autograd.grad(wanted, exact, dy.double())
    leaves = [x.requires_grad_(), bias.requires_grad_()]

    y = softmax(x, 0.3, keep, bias, 256, p, 11)
    got = torch.autograd.grad(y, leaves, dy)

    torch.testing.assert_close(y.double(), wanted, rtol=2**-8, atol=1e-7)
    for d, right in zip(got, gradients, strict=True):
        torch.testing.assert_close(d.double(), right, rtol=2**-8, atol=1e-6)


def test_dropout_of_softmax_is_philox_on_the_device() -> None:
    """What a GPU keeps is what Philox in numpy says, in a tile of whole rows and in a loop, past 32 bits of seed."""
    from reference_kernels.softmax import softmax
    from tests.kernels.test_softmax import _kept

    for shape in ((37, 1000), (5, 20001)):
        for seed in (3, 5 * 2**32 + 17):
            y = softmax(torch.zeros(shape, device="cuda"), dropout_p=0.3, seed=seed)
            assert torch.equal((y != 0).cpu(), _kept(shape, seed, 0.3))


def test_linear_layers_at_the_sizes_of_a_model() -> None:
    """Projections of grouped queries, a gated layer and low-rank adaptation with its gradients, through the large tiles
    of tensor cores, are float64's."""
    from reference_kernels.linear import gate_up_linear, lora_linear, qkv_linear

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16)

    def close(got: torch.Tensor, wanted: torch.Tensor) -> None:
        torch.testing.assert_close(got.double(), wanted, rtol=2**-8, atol=2e-3 * wanted.std().item())

    x, weights = normal(3000, 1024), (normal(4096, 1024), normal(1024, 1024), normal(1024, 1024))
    wide = x.double()
    for rows in (1, 40, 3000):
        for y, weight in zip(qkv_linear(x[:rows], *weights), weights, strict=True):
            close(y, wide[:rows] @ weight.double().t())
    gate, up = normal(4096, 1024) / 32, normal(4096, 1024)
    close(gate_up_linear(x, gate, up), F.silu(wide @ gate.double().t()) * (wide @ up.double().t()))
    for rank in (5, 16, 64, 128):
        leaves = [t.requires_grad_() for t in (x, weights[0], normal(rank, 1024) / 32, normal(4096, rank))]
        exact = [t.detach().double().requires_grad_() for t in leaves]
        dy = normal(3000, 4096)
        wanted = F.linear(exact[0], exact[1] + 2.0 * exact[3] @ exact[2])
        y = lora_linear(*leaves, 2.0)
        torch.testing.assert_close(y.double(), wanted, rtol=2**-7, atol=2e-2 * wanted.std().item())
        gradients = torch.autograd.grad(wanted, exact, dy.double())
        for d, right in zip(torch.autograd.grad(y, leaves, dy), gradients, strict=True):
            torch.testing.assert_close(d.double(), right, rtol=2**-7, atol=2e-2 * right.std().item())
