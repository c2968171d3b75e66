"""What else a serving process does: generators, autograd, graphs and threads go on as without a canary."""

from __future__ import annotations

import random
import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from pytest_fusion import canary
from pytest_fusion.canary import request
from pytest_fusion.canary.evidence.observation import Decision, Observation
from pytest_fusion.canary.live import router
from pytest_fusion.errors import CanaryError
from tests.canary.kernels import Kernel, Patient, added, double, made, observed


@pytest.mark.parametrize("state", ["shadow", "full"])
def test_generators_go_on_as_if_the_kernel_that_served_had_been_alone(state: str) -> None:
    """A shadowed candidate draws what the incumbent drew and leaves no trace; one that fails gives its draws back."""

    def incumbent(x: Tensor) -> Tensor:
        return x + torch.rand(3) + random.random()

    def candidate(x: Tensor) -> Tensor:
        result = incumbent(x)
        torch.rand(100)
        random.random()
        if state == "full" and calls:
            raise RuntimeError("late")
        calls.append(1)
        return result

    calls: list[int] = []
    judge = Patient()
    kernel = made(incumbent, candidate, judge, state=state, shadow=1.0, verify=0.0)

    def run(function: Kernel) -> list[Any]:
        torch.manual_seed(3)
        random.seed(3)
        return [function(torch.zeros(3)), function(torch.zeros(3)), torch.rand(2), random.random()]

    for ours, alone in zip(run(kernel), run(incumbent), strict=True):
        assert ours == alone if isinstance(ours, float) else torch.equal(ours, alone)
    kernel.refresh()
    # The thread that tends all canaries may read the comparison before or after the second call.
    assert sorted(observed(judge)) == (["ok", "ok"] if state == "shadow" else ["error", "ok"])


@pytest.mark.parametrize("state", ["shadow", "full"])
def test_gradients_flow_through_the_kernel_that_served(state: str) -> None:
    """Shadow adds nothing to the graph; a routed candidate that failed after writing nothing breaks no saved tensor."""
    fail = [False]

    def candidate(x: Tensor, w: Tensor) -> Tensor:
        if fail[0]:
            raise RuntimeError("no")
        return x * w * w

    kernel = made(lambda x, w: x * w * w, candidate, state=state, shadow=1.0, verify=1.0)
    x, w = torch.ones(3, requires_grad=True), torch.full((3,), 2.0, requires_grad=True)

    before = w.exp()
    first = kernel(x, w)
    fail[0] = True
    (kernel(x, w) + first + before).sum().backward()
    kernel.refresh()

    assert torch.equal(x.grad, torch.full((3,), 8.0))
    assert torch.allclose(w.grad, 2 * 2 * torch.full((3,), 2.0) + w.detach().exp())


def test_a_shadowed_candidate_records_no_graph() -> None:
    """Weights that the candidate holds itself make no history that keeps the copies alive."""
    weight = torch.ones(3, requires_grad=True)
    recorded: list[bool] = []

    def candidate(x: Tensor) -> Tensor:
        result = x * 2 * weight
        recorded.append(result.requires_grad)
        return result

    made(double, candidate, shadow=1.0)(torch.ones(3))

    assert recorded == [False]


def test_inference_mode_is_served() -> None:
    """Inference tensors, which have no version counter, are copied, restored and routed."""
    fail = [False]

    def candidate(x: Tensor) -> Tensor:
        if fail[0]:
            x.zero_()
            raise RuntimeError("no")
        return x * 2

    kernel = made(double, candidate, state="full", verify=0.0)
    with torch.inference_mode():
        x = torch.ones(3)
        kernel(x)
        fail[0] = True
        served = kernel(x)

    assert torch.equal(served, torch.full((3,), 2.0))
    assert kernel.status()["counts"]["fallbacks"] == 1


def test_recorded_calls_are_not_routed_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under capture a decision by call is refused with both ways out; by process, shadow and ``only`` go on."""
    monkeypatch.setattr(router, "recorded", lambda: True)
    x = torch.ones(1)
    routed = made(lambda x: "old", lambda x: "new", state="route", share=0.5)

    with pytest.raises(CanaryError, match=r"by='process'.*kernel\.only\('incumbent'\).*kernel\.decide"):
        routed(x)
    for arm, answer in (("incumbent", "old"), ("candidate", "new")):
        with routed.only(arm):
            assert routed(x) == answer
    assert made(lambda x: "old", lambda x: "new", state="shadow", shadow=1.0)(x) == "old"
    assert made(lambda x: "old", lambda x: "new", state="route", share=1.0, by="process")(x) == "new"
    assert made(lambda x: "old", lambda x: "new", state="full")(x) == "new"


def test_a_tripped_canary_decides_for_the_incumbent() -> None:
    """Whoever chooses among two graphs gets back at once."""
    kernel = made(double, added, state="full")
    assert kernel.decide("r") == "candidate"
    kernel.trip("by hand")
    assert kernel.decide("r") == "incumbent"
    with kernel.only("candidate"):
        assert kernel.state == "tripped"


def test_32_threads_lose_no_count_and_mix_no_result() -> None:
    """Each thread gets its own results, and calls, served calls and comparisons add up to the last one."""
    judge, ran = Patient(), [0]
    counting = threading.Lock()

    def incumbent(x: Tensor) -> Tensor:
        with counting:
            ran[0] += 1
        return x * 2

    kernel = made(incumbent, added, judge, state="shadow", shadow=1.0, share=0.5, verify=0.15)
    kernel(torch.ones(8))
    kernel.set_state("route")
    wrong: list[int] = []
    start = threading.Barrier(32)

    def work(number: int) -> None:
        start.wait()
        for step in range(40):
            with request(f"{number}-{step}"):
                value = float(number * 100 + step)
                if not torch.equal(kernel(torch.full((8,), value)), torch.full((8,), 2 * value)):
                    wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(32)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    kernel.refresh()
    status = kernel.status()
    chosen = sum(kernel.decide(f"{number}-{step}") == "candidate" for number in range(32) for step in range(40))
    verified = ran[0] - 1 - (32 * 40 - chosen)

    assert wrong == []
    assert status["calls"] == 32 * 40 + 1
    assert status["counts"]["served by the candidate"] == chosen
    assert verified > 0
    assert observed(judge) == ["ok"] * (verified + 1)
    assert status["counts"]["compared: ok"] == verified + 1


def test_a_judge_that_breaks_breaks_no_call() -> None:
    """What the judge raises is counted; the caller has its result."""

    class Broken:
        def update(self, observation: Observation) -> Decision:
            raise RuntimeError(observation.result)

    kernel = made(double, added, Broken(), shadow=1.0)
    assert torch.equal(kernel(torch.ones(2)), torch.full((2,), 2.0))
    kernel.refresh()

    assert kernel.status()["counts"]["judge errors"] == 1


@pytest.mark.parametrize("wrong", [{"name": "a:b"}, {"name": ""}, {"candidate": 3}, {"policy": "shadow"}])
def test_what_cannot_be_meant_is_refused(wrong: dict[str, Any]) -> None:
    """A wrong argument is named when the canary is made, not at its first call."""
    options = {"name": "k", "incumbent": double, "candidate": added, **wrong}
    with pytest.raises(CanaryError, match="expected a"):
        canary(options.pop("name"), **options)


def test_a_process_is_one_or_the_other() -> None:
    """Routed by process, a replica serves every call with one kernel, and about the share of replicas is new."""
    x = torch.ones(1)
    served: list[str] = []
    for replica in range(80):
        kernel = made(
            lambda x: "old", lambda x: "new", Patient(), state="route", share=0.5, by="process", replica=f"r{replica}"
        )
        kernel(x)  # the first call of its shape is the incumbent's
        answers = {kernel(x) for _ in range(5)}
        assert len(answers) == 1
        served += answers
        kernel.close()

    assert 20 < served.count("new") < 60
