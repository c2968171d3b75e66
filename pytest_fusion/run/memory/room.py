"""Whether tensors of gigabytes have room, checked before they are made."""

from __future__ import annotations

from collections.abc import Iterable

import torch

# Inputs of two calls, under one fill and the other, are alive at once; a third finds out why they differ.
_COPIES = 3
_GB = 1e9


def lacking(storages: Iterable[int], device: torch.device) -> str | None:
    """The reason why inputs with storages of these sizes do not fit; ``None`` where they do.

    On the CPU they are address space, for which there is no asking: it is refused or it is there.
    """
    if device.type != "cuda":
        return None
    wanted = _COPIES * sum(storages)
    free = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    if wanted <= free:
        return None
    return f"offsets beyond 2^31 need {wanted / _GB:.0f} GB, and {free / _GB:.0f} GB of {device} are free"
