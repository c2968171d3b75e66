"""The reference on copies of its own, natively and in lanes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pytest_fusion.errors import SpecError
from pytest_fusion.oracle.reference import ReferenceCrashed, ReferenceFailed, ReferenceRun, run_reference, takes
from pytest_fusion.spec.fusion_spec import FusionSpec
from pytest_fusion.spec.inputs import tensor

LANES = (0, 4)


def call(reference: Any, lanes: int, logical: Any = None, extra: Any = None, **keywords: Any) -> ReferenceRun:
    logical = {"x": torch.arange(6.0).reshape(2, 3)} if logical is None else logical
    inputs = {name: tensor("n") for name in logical}
    fixtures = tuple(extra or ())
    spec = FusionSpec(fused=reference, reference=reference, inputs=inputs, fixtures=fixtures, **keywords)
    read = lambda result, arguments: [result] if isinstance(result, torch.Tensor) else []  # noqa: E731
    return run_reference(spec, logical, extra or {}, read, lanes=lanes, seed=1)


@pytest.mark.parametrize("lanes", LANES)
def test_the_native_result_is_that_of_an_ordinary_call(lanes: int) -> None:
    """With and without lanes the reference returns what it returns alone, bit for bit."""
    run = call(lambda x: (x * 1.1).sum(-1), lanes)
    assert torch.equal(run.native[0], (torch.arange(6.0).reshape(2, 3) * 1.1).sum(-1))
    assert len(run.lanes) == bool(lanes)


@pytest.mark.parametrize("lanes", LANES)
def test_an_exception_of_the_reference_is_its_own(lanes: int) -> None:
    """It arrives as ``ReferenceFailed`` with the exception as cause."""
    with pytest.raises(ReferenceFailed, match="RuntimeError") as caught:
        call(lambda x: x.reshape(5), lanes)
    assert isinstance(caught.value.__cause__, RuntimeError)


@pytest.mark.parametrize(("sparse", "kind"), [("to_sparse", "Sparse"), ("to_sparse_csr", "SparseCsr")])
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_sparse_tensors_are_for_a_tolerance_of_ones_own(sparse: str, kind: str) -> None:
    """Their rounding is not followed, and the message says so; natively such a reference is as good as any."""

    def reference(x: torch.Tensor) -> torch.Tensor:
        return torch.sparse.mm(getattr(x, sparse)(), torch.ones(3, 2))

    assert call(reference, 0).native[0].tolist() == [[3, 3], [12, 12]]
    with pytest.raises(SpecError, match=rf"makes {kind} tensors, .* tolerance=Tolerance"):
        call(reference, 4)


@pytest.mark.parametrize("lanes", LANES)
def test_a_reference_that_loses_the_context_is_told_from_the_kernel(
    lanes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No case can be judged after it, and the message says whose doing it was."""
    monkeypatch.setattr("pytest_fusion.oracle.reference.cuda_is_poisoned", lambda: True)
    with pytest.raises(ReferenceCrashed, match=r"the reference itself lost the CUDA context.*bound the sizes in dims="):
        call(lambda x: x.reshape(5), lanes)


@pytest.mark.parametrize("lanes", LANES)
@pytest.mark.parametrize(
    "reference",
    [
        lambda x: x + torch.rand(3),
        lambda x: torch.nn.functional.dropout(x, 0.5),
        lambda x: torch.bernoulli(x * 0 + 0.5),
    ],
    ids=["rand", "dropout", "bernoulli"],
)
def test_a_random_reference_is_refused(reference: Any, lanes: int) -> None:
    """A reference that draws numbers has no single answer, whatever the tolerance."""
    with pytest.raises(SpecError, match="pass the noise, mask or seed as an input"):
        call(reference, lanes)


@pytest.mark.parametrize("lanes", LANES)
def test_a_reference_that_writes_an_undeclared_input_is_refused(lanes: int) -> None:
    """Writing is allowed where ``mutates`` or ``clobbers`` says so; the caller's tensor stays as it is."""
    logical = {"x": torch.ones(3)}
    with pytest.raises(SpecError, match="writes into its input 'x'; clone it first"):
        call(lambda x: x.mul_(2), lanes, logical)
    for keyword in ("mutates", "clobbers"):
        run = call(lambda x: x.mul_(2), lanes, logical, **{keyword: "x"})
        assert run.arguments["x"].tolist() == [2, 2, 2]
    assert logical["x"].tolist() == [1, 1, 1]


def test_writing_nan_over_nan_is_no_change() -> None:
    """Inputs are compared by their bits, in which a NaN equals itself."""
    call(lambda x: x + 0, 0, {"x": torch.tensor([float("nan"), 1.0])})


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.complex64, torch.float8_e4m3fn])
def test_inputs_of_any_dtype_are_compared(dtype: torch.dtype) -> None:
    """Bool, integer, complex and fp8 inputs, 0-d ones too, pass when they are left alone."""
    for shape in ((), (3,), (0,)):
        call(lambda x: x.clone(), 0, {"x": torch.ones(shape, dtype=torch.int8).to(dtype)})


def test_the_reference_gets_the_fixtures_that_it_takes() -> None:
    """A fixture that the reference does not name is kept from it; ``**kwargs`` take all."""
    assert call(lambda x, scale=1: x * scale, 0, extra={"scale": 3, "other": 4}).result[1, 0] == 9
    assert takes(lambda a, b: a, {"a": 1, "c": 2}) == {"a": 1}
    assert takes(lambda **k: k, {"a": 1}) == {"a": 1}
    assert takes(torch.add, {"a": 1}) == {}
