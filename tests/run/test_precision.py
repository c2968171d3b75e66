"""What torch's products leave out for speed, and that neither a reference nor a kernel is judged with it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch

from pytest_fusion.case.case_model import Case
from pytest_fusion.oracle import run_lanes
from pytest_fusion.run.fused import run_fused
from pytest_fusion.run.placing import place
from pytest_fusion.run.precision import default_precision, full_precision
from pytest_fusion.run.process.fork import run_isolated, unwrap

MATMUL, CUDNN, MKLDNN = torch.backends.cuda.matmul, torch.backends.cudnn, torch.backends.mkldnn
SUMS = ("allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction", "allow_fp16_accumulation")
OWNERS: dict[str, Any] = {
    "matmul": MATMUL, "cudnn.conv": CUDNN.conv, "cudnn.rnn": CUDNN.rnn,
    "mkldnn.matmul": MKLDNN.matmul, "mkldnn.conv": MKLDNN.conv, "mkldnn.rnn": MKLDNN.rnn,
}  # fmt: skip


def _state() -> dict[str, Any]:
    state = {name: getattr(MATMUL, name) for name in SUMS}
    state |= {name: owner.fp32_precision for name, owner in OWNERS.items()}
    for name, read in {
        "older": torch.get_float32_matmul_precision,
        "older cudnn": lambda: CUDNN.allow_tf32,
    }.items():
        try:
            state[name] = read()
        except RuntimeError:
            state[name] = "not told"
    return state


def _set(owner: Any, name: str, value: Any) -> Callable[[], None]:
    return lambda: setattr(owner, name, value)


CHOSEN: dict[str, Callable[[], Any]] = {
    "nothing": lambda: None,
    "high": lambda: torch.set_float32_matmul_precision("high"),
    "medium": lambda: torch.set_float32_matmul_precision("medium"),
    "newer matmul": _set(MATMUL, "fp32_precision", "tf32"),
    "newer everything": _set(torch.backends, "fp32_precision", "tf32"),
    "newer cudnn": _set(CUDNN, "fp32_precision", "ieee"),
    "newer conv": _set(CUDNN.conv, "fp32_precision", "ieee"),
    "newer mkldnn": _set(MKLDNN.matmul, "fp32_precision", "bf16"),
    "newer mkldnn conv": _set(MKLDNN.conv, "fp32_precision", "bf16"),
    "fp16 sums": _set(MATMUL, "allow_fp16_accumulation", True),
    "no split": _set(MATMUL, "allow_bf16_reduced_precision_reduction", (False, False)),
}


def _in_a_fork(body: Callable[[], None]) -> None:
    """What was set by the newer names cannot be unset, nor what that does to the older ones."""
    assert unwrap(run_isolated(lambda _: body(), time_limit_s=60)) is None


@pytest.mark.parametrize("context", [full_precision, default_precision])
@pytest.mark.parametrize("name", CHOSEN)
def test_every_setting_is_back_afterwards(name: str, context: Callable[[], AbstractContextManager[None]]) -> None:
    """By whichever names somebody chose: torch refuses to tell by the older ones what was set by the newer."""

    def body() -> None:
        CHOSEN[name]()
        before = _state()
        with context():
            pass
        assert _state() == before
        with pytest.raises(ZeroDivisionError), context():
            1 // 0  # noqa: B018 -- raises
        assert _state() == before
        assert getattr(MATMUL, f"{SUMS[0]}_split_k", True) == (name != "no split")

    _in_a_fork(body)


@pytest.mark.parametrize("name", CHOSEN)
def test_a_reference_runs_in_full_precision(name: str) -> None:
    """Nothing that anybody chose, or torch by itself, shortens what a reference multiplies."""

    def body() -> None:
        CHOSEN[name]()
        readable = _state()["older"] != "not told"
        seen: list[dict[str, Any]] = []

        def reference() -> list[torch.Tensor]:
            seen.append(_state())
            return [torch.ones(2)]

        run_lanes(reference, seed=1)
        assert len(seen) == 1
        assert not any(seen[0][name] for name in SUMS)
        assert {seen[0][name] for name in OWNERS} <= {"ieee", "none"}
        assert not readable or seen[0]["older"] == "highest"

    _in_a_fork(body)


def test_a_kernel_runs_without_what_nobody_chose() -> None:
    """Sums in bfloat16 and convolutions in TF32 are torch's defaults; TF32 in products is who asked for it."""
    seen: list[dict[str, Any]] = []

    def fused() -> torch.Tensor:
        seen.append(_state())
        return torch.ones(2)

    torch.set_float32_matmul_precision("high")
    before = _state()
    placed = place({}, Case({}, "float32", {}), torch.device("cpu"), "nan")
    try:
        outcome = run_fused(fused, placed, {}, programs=1)
        after = _state()
    finally:
        torch.set_float32_matmul_precision("highest")

    assert outcome.error is None
    assert not any(seen[0][name] for name in SUMS)
    assert (seen[0]["older cudnn"], seen[0]["older"]) == (False, "high")
    assert before == after
    assert (before["older cudnn"], before[SUMS[0]]) == (True, True), "torch has other defaults: see what else it does"
