"""What this GPU does at most, measured in the same run as what is held against it: a copy and a matrix product."""

from __future__ import annotations

from typing import Any

import torch

from pytest_fusion.run.measure.timing.graph_replay import replayed
from pytest_fusion.spec.wording import out_of_memory

# 512 MiB in and out pass every last-level cache many times; a product of 8192 cubed fills every multiprocessor.
_COPIED = 1 << 29
_SIDE = 8192
_CALLS, _SAMPLES = 4, 5


def ceilings(device: torch.device) -> dict[str, float]:
    """Bytes per second that a copy reads and writes, and bfloat16 operations per second of a matrix product.

    Under the names of a row's measures; takes some 30 ms on an H200. Empty where the memory for it is not free.
    """
    try:
        source = torch.randint(1 << 30, (_COPIED // 4,), dtype=torch.int32, device=device)
        both = {"source": source, "target": torch.empty_like(source)}
        copied = min(_best(copy, both, device) for copy in COPIES)
        del source, both
        x = torch.zeros(_SIDE, _SIDE, dtype=torch.bfloat16, device=device).normal_()
        multiplied = _best(torch.mm, {"input": x, "mat2": x, "out": torch.empty_like(x)}, device)
    except RuntimeError as error:
        if not out_of_memory(error):
            raise
        return {}
    return {"copy_bytes_per_s": 2 * _COPIED / copied, "matmul_flops_per_s": 2 * _SIDE**3 / multiplied}


def _by_engine(source: torch.Tensor, target: torch.Tensor) -> None:
    target.copy_(source)


def _by_kernel(source: torch.Tensor, target: torch.Tensor) -> None:
    torch.bitwise_not(source, out=target)


# As a node of a graph a copy is the driver's: on an H200 it moved 2.7 TB/s where a kernel moved 4.2.
COPIES = (_by_engine, _by_kernel)


def _best(call: Any, arguments: dict[str, Any], device: torch.device) -> float:
    batch = replayed(call, [arguments] * _CALLS, device)
    return min(batch.seconds() for _ in range(_SAMPLES))
