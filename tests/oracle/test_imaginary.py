"""References that compute with complex numbers are followed, gradients and Fourier transforms included."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from pytest_fusion.oracle import run_lanes
from pytest_fusion.oracle.tolerance import judge_output
from tests.oracle.tolerance.judging import judged

PHASES = torch.linspace(-3, 3, 24).reshape(6, 4)
FILTER = torch.linspace(-1, 2, 8)


def _turned(x: Tensor, *, sign: int = 1) -> Tensor:
    turn = torch.polar(torch.ones_like(PHASES), sign * PHASES).to(torch.complex128 if x.dtype == D else torch.complex64)
    return torch.view_as_real(torch.view_as_complex(x.reshape(6, 4, 2)) * turn).flatten(-2)


def _in_place(x: Tensor) -> Tensor:
    z = torch.view_as_complex(x.reshape(6, 4, 2).clone())
    z.mul_(z[0].conj())
    z[1] = 0
    return torch.view_as_real(z.conj().resolve_conj()).flatten(-2)


def _power(x: Tensor) -> Tensor:
    z = torch.complex(x[:, :4], x[:, 4:])
    return (z * z.conj()).real + z.abs() + z.angle()


def _convolved(x: Tensor) -> Tensor:
    filtered: Tensor = torch.fft.irfft(torch.fft.rfft(x, 16) * torch.fft.rfft(FILTER.to(x.dtype), 16), 16)
    return filtered[:, :8]


def _gradient(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def call(x: Tensor) -> Tensor:
        leaf = x.clone().requires_grad_()
        out = function(leaf)
        return torch.autograd.grad(out, leaf, _input(out.dtype, 12)[:, : out.shape[1]])[0]

    return call


D = torch.float64
FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "turned": _turned,
    "in place": _in_place,
    "power": _power,
    "convolved": _convolved,
    "gradient of turned": _gradient(_turned),
    "gradient of power": _gradient(_power),
    "gradient of convolved": _gradient(_convolved),
}


def _input(dtype: torch.dtype, seed: int = 11) -> Tensor:
    return torch.randn(6, 8, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_oracle_is_the_float64_result(name: str) -> None:
    """Lane 0 of what leaves complex64 again is what complex128 gives."""
    (output,) = run_lanes(lambda: [FUNCTIONS[name](_input(torch.float32))], seed=1).outputs
    # The phases themselves are float32 in both.
    torch.testing.assert_close(output.oracle, FUNCTIONS[name](_input(D)), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", FUNCTIONS)
def test_rounding_passes_and_an_error_does_not(name: str, seed: int) -> None:
    """The float64 result, rounded, passes for every input; one that is off by 2^-14 does not."""
    x = _input(torch.float32, seed)
    (output,), (more,) = (run_lanes(lambda: [FUNCTIONS[name](x)], lanes=n, seed=seed).outputs for n in (6, 24))
    right = output.oracle.float()
    assert judge_output(right, output, lambda: more).ok
    assert judge_output(output.native, output, lambda: more).ok
    assert not judge_output(right * (1 + 2.0**-14), output, lambda: more).ok


def test_a_cancelled_part_has_the_error_of_its_terms() -> None:
    """The real part of a product that nearly cancels may be off by what its two terms are rounded."""
    a = torch.view_as_complex(torch.tensor([[1.0, 1.0 + 2**-20], [3.0, 0.5]]))
    b = torch.view_as_complex(torch.tensor([[1.0 + 2**-21, 1.0], [1.0, 2.0]]))
    output = run_lanes(lambda: [torch.view_as_real(a * b)], seed=1).outputs[0]
    spread = (output.lanes - output.oracle).abs().amax(0)
    assert float(spread[0, 0]) > 2.0**-24
    assert float(spread[0, 0]) < 2.0**-18


def test_copies_of_complex_numbers_round_nothing() -> None:
    """What is only moved has its own value in every lane."""
    x = _input(torch.float32)

    def reference() -> list[Tensor]:
        z = torch.view_as_complex(x.reshape(6, 4, 2)).clone()
        return [torch.view_as_real(torch.cat([z, z.conj()])), torch.complex(x, x).real]

    for output in run_lanes(reference, seed=1).outputs:
        assert (output.lanes == output.oracle).all()
        assert torch.equal(output.oracle, output.native.double())


@pytest.mark.parametrize("seed", range(3))
def test_a_modulus_is_rounded_as_a_root_of_squares(seed: int) -> None:
    """As `hypot` is: of given numbers too, of which torch's own abs() was taken for exact."""
    x, y = torch.randn(2, 64, 64, generator=torch.Generator().manual_seed(seed))
    small, large = torch.minimum(x.abs(), y.abs()), torch.maximum(x.abs(), y.abs())
    for made in ((x * x + y * y).sqrt(), large * (1 + (small / large) ** 2).sqrt()):
        for reference in (lambda: torch.complex(x, y).abs(), lambda: torch.hypot(x, y)):
            assert judged(made, reference).ok
            assert not judged(made * (1 + 2**-18), reference).ok
            assert not judged(torch.maximum(made, large + 2**-8), reference).ok
