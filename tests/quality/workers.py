"""What runs in the worker processes of ``python -m tests.quality``.

A spawned process imports it; it could not import ``__main__`` of a package.
"""

from __future__ import annotations

import warnings


def quiet(as_gpu: bool = False) -> None:
    """One thread, no warnings, and the lane of this machine before anything imports Triton."""
    from pytest_fusion.run import device_choice

    device_choice.prepare(device_choice.choose("auto"))
    import torch

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if as_gpu:
        from tests.quality.as_gpu import switch_on

        switch_on()


def plant_row(job: tuple[str, int]) -> tuple[str, ...]:
    """A line of the table of planted bugs, for a name and a seed."""
    from tests.quality import measure

    name, seed = job
    finding = measure.examine_plant(name, seed)
    record = finding.record
    late = "" if record.seconds <= measure.TIME_LIMIT else f"took {record.seconds:.1f} s"
    return (
        finding.plant.bug_class,
        name,
        str(seed),
        str(finding.worst["level"]) or "no",
        str(finding.worst["check"]),
        finding.cause,
        "right" if finding.cause_is_right else "not " + "|".join(sorted(finding.plant.causes)),
        f"{record.seconds:.1f}",
        ", ".join(f"{key}={value}" for key, value in finding.dims.items()),
        "; ".join(filter(None, [finding.trouble, late])),
    )


def honest_row(job: tuple[str, int, int]) -> tuple[str, ...]:
    """A line of the table of honest kernels, for a name, a number of cases and a first seed."""
    from tests.quality import measure

    name, cases, seed = job
    alarms = measure.examine_honest(name, cases, seed)
    told = "; ".join((record.message or str(record.checks)).replace("\n", " | ") for record in alarms.accusations)
    told = "; ".join(filter(None, [told, *alarms.hazards]))
    counts = (str(alarms.cases), str(len(alarms.accusations)), str(len(alarms.hazards)))
    return (name, *counts, f"{alarms.seconds:.1f}", told)
