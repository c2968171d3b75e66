"""Tensors that go from one process to another arrive as they were, or the file is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pytest_fusion.canary.offline.kernel import bytes_of, read_tensors, write_tensors
from pytest_fusion.errors import CanaryError

CPU = torch.device("cpu")


def test_tensors(tmp_path: Path) -> None:
    """Names, dtypes, shapes and bits; also of empty, scalar, strided and complex ones, and of formats numpy lacks."""
    tensors = {
        "out": torch.randn(3, 5).t(),
        "out['a']": torch.tensor(7),
        "empty": torch.empty(0, 4, dtype=torch.float16),
        "bf16": torch.tensor([1.5, float("nan")], dtype=torch.bfloat16),
        "fp8": torch.tensor([1.5, 2.0]).to(torch.float8_e4m3fn),
        "bool": torch.tensor([[True], [False]]),
        "complex": torch.tensor([1 + 2j]).conj(),
        "one": torch.empty_strided((1, 1), (14, 14), dtype=torch.float16).fill_(3),
    }
    write_tensors(tmp_path / "results", tensors)
    found = read_tensors(tmp_path / "results", CPU)
    assert list(found) == list(tensors)
    for name, tensor in tensors.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
        assert bytes_of(found[name]) == bytes_of(tensor)
        assert len(bytes_of(tensor)) == tensor.numel() * tensor.element_size()


@pytest.mark.parametrize(
    "data", [b"", b'\0\0\0\x05[["x', b"\0\0\0\x02[]", b'\0\0\0\x1b[["x","torch.load",[1],4]]  abcd']
)
def test_a_damaged_file(tmp_path: Path, data: bytes) -> None:
    """It is refused by name; a dtype is looked up among dtypes, and nothing is unpickled. No tensors are none."""
    (tmp_path / "results").write_bytes(data)
    if data.endswith(b"[]"):
        assert read_tensors(tmp_path / "results", CPU) == {}
        return
    with pytest.raises(CanaryError, match="cannot be read"):
        read_tensors(tmp_path / "results", CPU)
