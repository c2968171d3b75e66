"""The cause in what the assembler made of a kernel: its source is not at fault, and no interpreter shows it."""

from __future__ import annotations

from pytest_fusion.diagnosis.diagnosis_model import Found
from pytest_fusion.diagnosis.experiments import Lab
from pytest_fusion.run.measure.resources.loaded_kernels import loaded
from pytest_fusion.run.measure.resources.resource_record import Resources


def miscompiled(lab: Lab) -> Found | None:
    """A kernel that the failing call launches computes with a register that nothing has written."""
    if lab.bench.device.type != "cuda":
        return None
    kernels: list[Resources] = []
    with loaded(kernels):
        if not lab.once(lab.base).wrong:
            return None
    # What ran can have been refused for its machine code alone.
    wrong = [f"{kernel.kernel}: {kernel.reason}" for kernel in kernels if kernel.status == "refused"]
    if kernels and not wrong:
        lab.ruled_out.append("machine code: no register of the kernels is read before it is written")
    return Found("miscompiled", wrong) if wrong else None
