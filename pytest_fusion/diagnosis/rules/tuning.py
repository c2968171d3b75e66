"""Rule about autotuned kernels: whether the first config is wrong, and not the kernel."""

from __future__ import annotations

from pytest_fusion.case.case_model import Config
from pytest_fusion.diagnosis.experiments import Found, Lab

# More configs than that are sampled from both ends; each takes one to four runs.
_MOST_CONFIGS = 12


def config(lab: Lab) -> Found | None:
    """Wrong with the first config of a kernel, right with another one, for every seed tried."""
    answer = lab.attempt(lab.base)
    if not answer.wrong or answer.probe is None or lab.base.configs:
        return None
    for seen in answer.probe.result.tuned.values():
        numbers = sorted(seen.survivors)
        chosen = numbers if len(numbers) <= _MOST_CONFIGS else numbers[:: -(-len(numbers) // _MOST_CONFIGS)]
        for index in chosen:
            if index not in seen.launched and lab.always_right(lab.base.with_(configs={seen.kernel: Config(index)})):
                wrong = ", ".join(map(seen.called, sorted(seen.launched)))
                return Found("bad-config", [f"right with {seen.called(index)}, wrong with {wrong}"])
    if answer.probe.result.tuned:
        lab.ruled_out.append("config: no config of the autotuned kernels makes the difference")
    return None
