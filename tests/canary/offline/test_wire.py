"""What goes between two processes arrives as it was, or is told not to."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from pytest_fusion.canary.offline.incumbent.wire import Gone, bytes_of, read_tensors, receive, send, write_tensors
from pytest_fusion.errors import CanaryError

CPU = torch.device("cpu")


@pytest.fixture
def pipe() -> Iterator[list[int]]:
    ends = list(os.pipe())
    yield ends
    for end in ends:
        if end >= 0:
            os.close(end)


def test_messages(pipe: list[int]) -> None:
    """Two messages written at once are read one by one."""
    reader, writer = pipe
    send(writer, {"a": 1})
    send(writer, {"text": "ü" * 10_000})
    assert receive(reader) == {"a": 1}
    assert receive(reader, 5.0) == {"text": "ü" * 10_000}


def test_a_closed_pipe_and_a_silent_one(pipe: list[int]) -> None:
    """Whoever waits for a process that is gone, or says nothing in time, is told which of the two it is."""
    reader, writer = pipe
    with pytest.raises(Gone) as silent:
        receive(reader, 0.0)
    os.write(writer, b"\0\0")
    os.close(writer)
    pipe[1] = -1
    with pytest.raises(Gone) as closed:
        receive(reader)
    assert (silent.value.late, closed.value.late) == (True, False)
    os.close(reader)
    pipe[0] = -1
    other_reader, pipe[1] = os.pipe()
    os.close(other_reader)
    with pytest.raises(Gone):
        send(pipe[1], {})


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
