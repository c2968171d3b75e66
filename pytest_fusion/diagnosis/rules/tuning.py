"""Rule about autotuned kernels: is it the config that was chosen, and not the kernel?"""

from __future__ import annotations

from pytest_fusion.diagnosis.diagnosis_model import Found
from pytest_fusion.diagnosis.experiments import Lab
from pytest_fusion.run.autotuned import Tuned, forced, noted

# More configs than that are sampled from both ends; each takes one or two runs.
_MOST_CONFIGS = 12


def config(lab: Lab) -> Found | None:
    """Wrong with the config that the kernel chose, right with another one, for every seed tried."""
    tuned: dict[int, Tuned] = {}
    with noted(tuned):
        wrong = lab.once(lab.base).wrong
    if not wrong:
        return None
    for seen in tuned.values():
        numbers = sorted(seen.survivors)
        chosen = numbers if len(numbers) <= _MOST_CONFIGS else numbers[:: -(-len(numbers) // _MOST_CONFIGS)]
        right = [index for index in chosen if _right(lab, seen, index)]
        bad = [index for index in chosen if index not in right]
        if right and bad:
            return Found("bad-config", [f"right with {seen.called(right[0])}, wrong with {seen.called(bad[0])}"])
        if right and len(tuned) == 1 and lab.once(lab.base).wrong:
            fact = f"right with {seen.called(right[0])} and every other config that its pruning leaves for these sizes"
            held = "wrong with the one that an earlier call chose: the key lacks what that choice depends on"
            return Found("bad-config", [fact, held])
    if tuned:
        lab.ruled_out.append("config: no config of the autotuned kernels makes the difference")
    return None


def _right(lab: Lab, seen: Tuned, index: int) -> bool:
    for seed in lab.seeds():
        with forced(seen.tuner, index) as applied:
            answer = lab.once(lab.base.with_(seed=seed))
        if not (answer.right and applied.launches):
            return False
    return True
