"""Questions about the device while modules are imported: a child answers until CUDA has started here."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from pytest_fusion.run import device_facts

STARTED = "CUDA is initialised in this process"


class Properties:
    """As torch's own: neither it nor all that it has does pickle."""

    name, major, uuid = "a GPU", 9, object()

    def __reduce__(self) -> str:
        raise TypeError("cannot pickle")


def module(log: Path) -> Any:
    """A ``torch.cuda`` that writes down which process calls it."""
    cuda: Any = ModuleType("torch.cuda")

    def note() -> None:
        with log.open("a") as file:
            file.write(f"{os.getpid()}\n")

    def current_device() -> int:
        note()
        return 3

    def get_device_properties(device: int) -> Properties:
        note()
        if device:
            raise AssertionError("Invalid device id")
        return Properties()

    cuda.current_device, cuda.get_device_properties = current_device, get_device_properties
    device_facts._of_torch(cuda)
    return cuda


@pytest.mark.parametrize("device", [None, 0, "cuda:0", torch.device("cuda")])
def test_a_child_answers_once(device: Any, tmp_path: Path) -> None:
    """It is called once for a device, however that is written, and what it says has torch's attributes."""
    cuda = module(tmp_path / "log")
    found = [cuda.get_device_properties(device), cuda.get_device_properties(0)][0]
    (process,) = (tmp_path / "log").read_text().split()
    assert int(process) != os.getpid()
    assert (found.name, found.major) == ("a GPU", 9)
    assert found.uuid == str(Properties.uuid)


def test_the_current_device_is_the_first(tmp_path: Path) -> None:
    """No process has to start CUDA to say so."""
    assert module(tmp_path / "log").current_device() == 0
    assert not (tmp_path / "log").exists()


def test_what_a_child_cannot_answer_is_found_here(tmp_path: Path) -> None:
    """The error is the caller's own."""
    with pytest.raises(AssertionError, match="Invalid device id"):
        module(tmp_path / "log").get_device_properties(1)


def test_once_cuda_has_started_nothing_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The functions themselves answer, in this process, whatever a child said before."""
    cuda = module(tmp_path / "log")
    cuda.get_device_properties()
    monkeypatch.setattr(device_facts, "can_fork", lambda: STARTED)
    assert cuda.current_device() == 3
    assert isinstance(cuda.get_device_properties(0), Properties)
    assert [int(process) for process in (tmp_path / "log").read_text().split()[1:]] == [os.getpid()] * 2


def test_the_driver_of_triton_is_answered_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each instance has its function from a module that is built when it is made, and which does not start CUDA."""
    started: list[bool] = []
    monkeypatch.setattr(torch.cuda, "init", lambda: started.append(True))

    class CudaUtils:
        def __init__(self) -> None:
            self.get_device_properties = self.properties

        def properties(self, device: int) -> dict[str, int]:
            if not started:
                raise RuntimeError("Triton Error [CUDA]: initialization error")
            return {"max_shared_mem": 1 << device, "process": os.getpid()}

    device_facts._of_triton(SimpleNamespace(CudaUtils=CudaUtils))
    found: Any = CudaUtils().get_device_properties(4)
    assert found["max_shared_mem"] == 16
    assert found["process"] != os.getpid()
    assert not started


def test_functions_are_replaced_as_soon_as_their_module_is_imported() -> None:
    """Before a module that imports torch can call them; torch.cuda's other questions end there."""
    code = """
from pytest_fusion.run import device_facts
device_facts.answer_without_cuda()
import torch
torch.cuda._lazy_init = lambda: None
names = torch.cuda.get_device_properties.__wrapped__.__globals__
names["_get_device_index"], names["device_count"] = lambda *_, **__: 0, lambda: 1
names["_get_device_properties"] = lambda device: type("P", (), {"name": "a GPU"})()
print(torch.cuda.get_device_properties.__module__, torch.cuda.current_device.__wrapped__.__name__)
print(torch.cuda.get_device_name())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.split("\n") == ["torch.cuda current_device", "a GPU", ""]
