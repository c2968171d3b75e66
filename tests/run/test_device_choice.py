"""Which GPU a process uses, as far as environment variables say; no GPU is needed."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest

from pytest_fusion.plugin import hooks
from pytest_fusion.run import device_choice


@pytest.fixture
def four_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_choice, "cuda_devices", lambda: 4)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.mark.parametrize(
    ("wanted", "worker", "visible"),
    [
        ("auto", "gw0", "0,1,2,3"),
        ("cuda", "gw2", "2,3,0,1"),
        ("auto", "gw5", "1,2,3,0"),
        ("cuda:1", "gw2", None),
        ("cpu", "gw2", None),
        ("auto", "", None),
    ],
)
@pytest.mark.usefixtures("four_gpus")
def test_each_worker_sees_a_gpu_of_its_own_first(wanted: str, worker: str, visible: str | None) -> None:
    """The others stay visible; a device that the user names, and a run without workers, change nothing."""
    device_choice.take_own(wanted, worker)
    assert os.environ.get("CUDA_VISIBLE_DEVICES") == visible


@pytest.mark.usefixtures("four_gpus")
def test_gpus_that_the_user_hides_stay_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers share those that ``CUDA_VISIBLE_DEVICES`` lists, by whatever name."""
    monkeypatch.setattr(device_choice, "cuda_devices", lambda: 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-ab,GPU-cd")
    device_choice.take_own("auto", "gw3")
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "GPU-cd,GPU-ab"


@pytest.mark.parametrize(("wanted", "gpus", "workers"), [("auto", 4, 4), ("cpu", 4, None), ("auto", 0, None)])
def test_auto_is_a_worker_for_each_gpu(
    wanted: str, gpus: int, workers: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where kernels run on the CPU, pytest-xdist counts cores."""
    monkeypatch.setattr(device_choice, "cuda_devices", lambda: gpus)
    config = SimpleNamespace(option=SimpleNamespace(fusion_device=wanted), getini=lambda _: None)
    assert hooks.pytest_xdist_auto_num_workers(config) == workers  # type: ignore[arg-type]
