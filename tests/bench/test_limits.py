"""`bench_limits=`: what can be asked, and when a measured row is over, within, or not known."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from pytest_fusion import FusionSpec, SpecError, tensor
from pytest_fusion.bench.baseline.row import Row
from pytest_fusion.bench.limits import limited, notes
from pytest_fusion.bench.measured import Measured, failure_line
from tests.report.benched import latency, rows


def spec(limits: Any, **more: Any) -> FusionSpec:
    fields: dict[str, Any] = {"bench": [{"n": 8}], **more}
    return FusionSpec(
        name="scale", fused=scale, reference=scale, inputs={"x": tensor("n")}, bench_limits=limits, **fields
    )


def scale(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def judged(limit: str, allowed: float, found: list[Row], **more: Any) -> list[tuple[str, str]]:
    return [(one.verdict, one.reason) for one in limited(found, {limit: allowed}, **more)]


def verdict(limit: str, allowed: float, **fused: Any) -> str:
    ((found, _),) = judged(limit, allowed, rows(fused=fused))
    return found


def test_limits_become_numbers() -> None:
    """A ratio, a share, and bytes from text or a number; reading them again changes nothing."""
    found = spec({"latency_ratio": 1, "copy_bandwidth": 0.8, "peak_memory": "1.5 MiB"}).bench_limits

    assert found == {"latency_ratio": 1.0, "copy_bandwidth": 0.8, "peak_memory": 3 * 2**19}
    assert spec(found).with_(name="again").bench_limits == found
    assert spec({}).bench_limits == {}
    assert [spec({"peak_memory": text}).bench_limits["peak_memory"] for text in ("0 B", "2 kB", "1gb", 7)] == [
        0, 2000, 10**9, 7,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("limits", "said"),
    [
        ({"latency": 1}, "did you mean 'latency_ratio'"),
        ([0.5], "expected a dict such as"),
        ({"latency_ratio": 0}, "expected a number above 0: time of the fused call over the reference's"),
        ({"latency_ratio": True}, "expected a number above 0"),
        ({"latency_ratio": math.nan}, "expected a number above 0"),
        ({"latency_ratio": "0.5"}, "expected a number above 0"),
        ({"copy_bandwidth": 80}, "expected a share from 0 to 1"),
        ({"peak_memory": "64 MeB"}, "'MeB' is no unit of bytes; did you mean 'MB'|'MeB' is no unit of bytes"),
        ({"peak_memory": "much"}, "expected bytes at most, such as 67108864 or '64 MiB'"),
        ({"peak_memory": 1.5}, "expected bytes at most"),
        ({"peak_memory": -1}, "expected bytes at most"),
    ],
)
def test_what_cannot_be_asked_is_refused(limits: Any, said: str) -> None:
    """The message names the spec, the limit, and what is expected."""
    with pytest.raises(SpecError, match=f"scale: bench_limits=.*({said})"):
        spec(limits)


def test_limits_of_nothing_are_refused() -> None:
    """Without sizes nothing would ever be judged by them."""
    with pytest.raises(SpecError, match="bench_limits= bounds what bench= measures"):
        spec({"latency_ratio": 1}, bench=())


def test_a_kernel_slower_than_its_limit_is_over() -> None:
    """The message has the ratio, its interval, and what is allowed."""
    ((found, reason),) = judged("latency_ratio", 0.1, rows())

    assert found == "over"
    assert reason == "latency_ratio: 0.146 times the reference's time (0.144 to 0.147), at most 0.1 is allowed"


def test_a_kernel_faster_than_its_limit_is_within() -> None:
    """The whole interval is below it."""
    assert verdict("latency_ratio", 0.2) == "within"


@pytest.mark.parametrize(
    ("allowed", "changes", "why"),
    [
        (73.8 / 506 * 1.005, {}, "too close to decide"),
        (73.8 / 506 * 0.995, {}, "too close to decide"),
        (0.1, {"aa": 0.2}, "too close to decide"),
        (0.1, {"aa": None}, "not measured against itself"),
        (0.1, {"blocks": (0.0,) * 2}, "2 blocks were measured"),
        (0.1, {"method": {"timer": "graph/events"}}, "timed in two ways"),
        (0.1, {"ratio": math.nan, "low": math.nan, "high": math.nan}, "too close"),
    ],
)
def test_a_ratio_that_cannot_be_told_from_its_limit_is_unknown(
    allowed: float, changes: dict[str, Any], why: str
) -> None:
    """An interval around the limit, a machine that differs from itself, too few blocks, two clocks."""
    ((found, reason),) = judged("latency_ratio", allowed, rows(fused={"latency": latency(73.8e-6, 506e-6, **changes)}))

    assert found == "unknown"
    assert why in reason


def test_a_kernel_below_its_share_of_a_copy_is_over() -> None:
    """The message has both rates with units."""
    ((found, reason),) = judged("copy_bandwidth", 0.95, rows())

    assert found == "over"
    assert reason == "copy_bandwidth: 3.64 TB/s is 90.9 % of the 4 TB/s of a copy, at least 95 % is required"


def test_a_kernel_above_its_share_of_a_copy_is_within() -> None:
    """Bytes of inputs and outputs over the time are what counts."""
    assert verdict("copy_bandwidth", 0.8) == "within"


@pytest.mark.parametrize(
    ("allowed", "fused", "why"),
    [
        (0.9, {}, "too close to decide"),
        (0.5, {"measures": {"copy_bytes_per_s": None}}, "no copy bandwidth was measured"),
        (0.5, {"facts": {"bytes.algorithmic": None}}, "bytes of inputs and outputs are not known"),
        (0.99, {"latency": latency(1e-3, 1e-3, method={"timer": "events", "cache": "cold"})}, "timer events"),
        (0.5, {"latency": latency(7e-5, 1e-3, method={"timer": "graph", "cache": "warm"})}, "cache warm"),
        (0.99, {"latency": latency(1e-3, 1e-3, aa=None)}, "not measured against itself"),
    ],
)
def test_a_share_that_was_not_measured_alike_is_unknown(allowed: float, fused: dict[str, Any], why: str) -> None:
    """Events hold the host's gaps, and a cache is no memory: neither fails nor passes."""
    ((found, reason),) = judged("copy_bandwidth", allowed, rows(fused=fused))

    assert found == "unknown"
    assert why in reason


def test_memory_is_judged_to_the_byte() -> None:
    """One byte above the limit is over, the limit itself within."""
    peak = 268_451_840 // 2

    assert verdict("peak_memory", peak) == "within"
    ((found, reason),) = judged("peak_memory", peak - 1, rows())
    assert found == "over"
    assert reason == (
        "peak_memory: 134,225,920 B (128.0 MiB) above the inputs, at most 134,225,919 B (128.0 MiB) is allowed"
    )


def test_memory_that_was_not_measured_is_unknown() -> None:
    """A machine without a GPU says nothing about it."""
    ((found, reason),) = judged("peak_memory", 1, rows(fused_s=None))

    assert (found, reason) == ("unknown", "peak_memory: no device memory was measured; a GPU is needed")


def test_a_noisy_machine_judges_no_time_and_all_memory() -> None:
    """Its reason is told; bytes do not depend on it."""
    limits = {"latency_ratio": 0.1, "copy_bandwidth": 0.99, "peak_memory": 1}
    found = limited(rows(), limits, noisy="this machine favours one side")

    assert [one.verdict for one in found] == ["unknown", "unknown", "over"]
    assert found[0].reason == "latency_ratio: this machine favours one side"


def test_only_the_forward_call_of_the_kernel_has_limits() -> None:
    """Not its reference, its backward, another implementation, nor a row that is no call."""
    own = rows()
    sweep = Row(own[0].test, "all entries", "fused", own[0].device, facts={"recompiles": 2})
    compiled = Row(own[0].test, own[0].case, "compiled", own[0].device, latency=own[0].latency)
    found = limited([*own, *rows(phase="backward"), sweep, compiled], {"latency_ratio": 0.1})

    assert [(one.key.case, one.key.role) for one in found] == [(own[0].case, "fused")]


def test_what_is_over_fails_and_is_told_and_the_rest_is_a_note() -> None:
    """Unknown limits of several cases are one note for each reason."""
    found = limited([*rows(), *rows("n=1"), *rows("n=2")], {"peak_memory": 1})
    measured = Measured(limits=found[:1])
    blind = limited([*rows(fused_s=None), *rows("n=1", fused_s=None)], {"latency_ratio": 1.0})

    assert measured.failures == found[:1]
    assert failure_line(found[0]).startswith("rows=8192 hidden=8192 bfloat16, fused: over: peak_memory: 134,225,920 B")
    assert measured.as_json()["limits"][0]["verdict"] == "over"
    assert notes(found) == []
    said = "latency_ratio: no latency was measured; interpreted kernels have none, a GPU is needed"
    assert notes(blind) == [f"bench_limits not judged in rows=8192 hidden=8192 bfloat16 and 1 more: {said}"]
