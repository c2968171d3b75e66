"""Bytes and operations of calls, from shapes alone."""

from __future__ import annotations

import pytest
import torch

from pytest_fusion.run.measure.traffic import algorithmic_bytes, bytes_of, traffic_of

DEVICES = ("cpu", "meta")


@pytest.mark.parametrize("device", DEVICES)
def test_each_operation_reads_its_operands_and_writes_its_result(device: str) -> None:
    """``x * w + b`` is two passes over memory; so is it for tensors that hold no data."""
    x, w, b = torch.empty(64, 32, device=device), torch.empty(32, device=device), torch.empty(32, device=device)

    found = traffic_of(lambda: x * w + b)

    assert found.bytes == 2 * (2 * 64 * 32 + 32) * 4
    assert (found.operations, found.flops) == (2, 0)
    assert found.largest == 64 * 32


@pytest.mark.parametrize("device", DEVICES)
def test_views_and_fresh_memory_move_nothing(device: str) -> None:
    """A transpose, a slice, ``empty`` and ``detach`` cost no bytes; a cast and a strided copy do."""
    x = torch.empty(64, 32, device=device)

    assert traffic_of(lambda: torch.empty_like(x.t()[1:].detach())).bytes == 0
    assert traffic_of(x.half).bytes == 64 * 32 * 6
    assert traffic_of(lambda: x.t().contiguous()).bytes == 64 * 32 * 8
    assert traffic_of(x.contiguous).bytes == 0


@pytest.mark.parametrize("device", DEVICES)
def test_what_is_overwritten_is_not_read(device: str) -> None:
    """``copy_`` and ``zero_`` write only; ``add_`` reads what it writes."""
    x, y = torch.empty(64, device=device), torch.empty(64, device=device)

    assert traffic_of(lambda: x.copy_(y)).bytes == 2 * 64 * 4
    assert traffic_of(x.zero_).bytes == 64 * 4
    assert traffic_of(lambda: x.add_(y)).bytes == 3 * 64 * 4


@pytest.mark.parametrize("device", DEVICES)
def test_products_are_counted(device: str) -> None:
    """Two operations a multiply-add."""
    a, b = torch.empty(8, 16, device=device), torch.empty(16, 4, device=device)

    assert traffic_of(lambda: torch.relu(a @ b)).flops == 2 * 8 * 16 * 4


def test_fused_bytes_are_inputs_and_outputs_once() -> None:
    """An expanded input is one slice, a tensor given twice is read once, one written in place moves twice."""
    x, row = torch.empty(64, 32), torch.empty(1, 32)

    assert algorithmic_bytes([x, row.expand(64, 32), None, 1.0], x + row) == (64 * 32 + 32 + 64 * 32) * 4
    assert algorithmic_bytes([x, x], (x,)) == 2 * 64 * 32 * 4
    assert bytes_of([x[:0]]) == 0
