"""Classes of devices: where facts compare, and where latencies do."""

from __future__ import annotations

import pytest

from pytest_fusion.bench.baseline.row import MODELLED, device_class, elsewhere, latency_place, renewed, unit_of

GPU = {
    "lane": "cuda",
    "device_name": "NVIDIA H200",
    "capability": "9.0",
    "driver": "580.65.06",
    "torch": "2.11.0+cu130",
    "triton": "3.6.0",
}


def test_each_gpu_model_is_a_class_and_all_processors_are_one() -> None:
    """What is counted without a GPU is modelled, the same on every processor, and never mixed with a GPU's."""
    assert device_class(GPU) == "NVIDIA H200 (sm_90)"
    assert device_class({"lane": "cpu-interpreter", "device_name": "Xeon"}) == MODELLED
    assert device_class({**GPU, "capability": None}) == "NVIDIA H200"


def test_a_gpu_without_a_name_is_no_class() -> None:
    """Its facts would be taken for those of any other such GPU."""
    with pytest.raises(ValueError, match="no name"):
        device_class({"lane": "cuda", "device_name": None})


@pytest.mark.parametrize(
    ("change", "differs"),
    [
        ({}, None),
        ({"torch": "2.11.1+cu128", "driver": "580.95.05"}, None),
        ({"torch": "2.13.0"}, "torch 2.11 there, 2.13 here"),
        ({"driver": "590.10"}, "driver 580 there, 590 here"),
        ({"device_name": "NVIDIA H100"}, "GPU NVIDIA H200 there, NVIDIA H100 here"),
        ({"mig": "1g.18gb"}, "MIG profile unknown there, 1g.18gb here"),
    ],
)
def test_latency_compares_on_one_model_driver_and_compiler(change: dict[str, str], differs: str | None) -> None:
    """Patch releases are the same place; another minor release, driver or part of a GPU is not."""
    assert elsewhere(latency_place(GPU), latency_place({**GPU, **change})) == differs


def test_a_unit_is_told_and_not_disclosed() -> None:
    """Two GPUs of a model differ; the file does not say which they are, and an unknown one is unknown."""
    assert unit_of("GPU-1") != unit_of("GPU-2")
    assert unit_of(None) == ""
    assert "GPU" not in unit_of("GPU-1")


def test_renewed_versions_are_named() -> None:
    """Versions that both sides know and that differ are told; the others are not."""
    assert renewed({"triton": "3.6.0", "torch": "2.11.0"}, {"triton": "3.7.1", "torch": "2.11.0", "cuda": "13.0"}) == (
        "; the baseline was made with triton 3.6.0, this is 3.7.1"
    )
    assert renewed({}, {"triton": "3.7.1"}) == ""
