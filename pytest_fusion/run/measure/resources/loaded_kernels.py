"""The resources of a kernel on a GPU, read from what Triton loaded onto it.

Touches ``n_regs``, ``n_spills``, ``metadata``, ``asm`` and ``_init_handles`` of ``CompiledKernel``: the same in 3.6.0,
3.7.1 and 3.9.0. ``n_spills`` is the driver's local memory of a thread in words of four bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from pytest_fusion.run.measure.resources import cubin
from pytest_fusion.run.measure.resources.noting import Noted, noted
from pytest_fusion.run.measure.resources.specialisation import Specialisation
from pytest_fusion.run.measure.resources.targets import TARGETS, Resources, occupancy

_WORD = 4


@contextmanager
def loaded(into: list[Resources], launches: list[Specialisation] | None = None) -> Iterator[None]:
    """Read each launched specialisation once, in order, and list all ``launches``, an autotuner's trials included."""
    seen: set[str] = set()

    def then(kernel: Any, launch: Noted) -> None:
        found = launch.specialisation
        if launches is not None and found is not None:
            launches.append(found)
        key = found.key() if found is not None else f"{launch.kernel}: {launch.reason}"
        if key not in seen:
            seen.add(key)
            into.append(read(kernel, launch))

    with noted([], then=then):
        yield


def read(kernel: Any, launch: Noted) -> Resources:
    """The record of one launch; ``kernel`` is its return value, ``None`` if it was not compiled."""
    found = launch.specialisation
    constants = found.constants if found is not None else {}
    file = found.place.file if found is not None else ""
    # A kernel that another process is still compiling is a future.
    kernel = kernel.result() if hasattr(kernel, "result") else kernel
    metadata = getattr(kernel, "metadata", None)
    if metadata is None or metadata.target.backend != "cuda":
        return Resources(launch.kernel, "device", "unknown", "the launch returned no compiled CUDA kernel", file=file)
    kernel._init_handles()
    name = f"sm_{metadata.target.arch}"
    target = TARGETS.get(name)
    try:
        from triton import knobs

        usage = cubin.read(kernel.asm["cubin"], str(knobs.nvidia.cuobjdump.path))
        static, instructions, note = usage.shared_static, usage.instructions, ""
    except (cubin.NoToolError, RuntimeError, KeyError) as error:
        static, instructions, note = 0, {}, f"its instructions cannot be read: {error}"
    made = Resources(
        launch.kernel,
        name,
        file=file,
        line=found.place.line if found is not None else 0,
        registers=int(kernel.n_regs),
        local_bytes=_WORD * int(kernel.n_spills),
        shared_static=static if target is None else target.static(static),
        shared_dynamic=int(metadata.shared),
        tensor_columns=int(getattr(metadata, "tmem_size", None) or 0),
        warps=int(metadata.num_warps),
        instructions=instructions,
        constants=constants,
        note=note,
    )
    return made if target is None else replace(made, occupancy=occupancy(target, made))
