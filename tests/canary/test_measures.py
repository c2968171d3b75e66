"""Which kernel is slower, and which is nearer to the truth: seen where it is so, and held against no equal one."""

from __future__ import annotations

import math
import random
import threading
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from pytest_fusion import FusionSpec, tensor
from pytest_fusion.canary import Canary, Policy, canary
from pytest_fusion.canary.evidence.evidence_counts import Evidence
from pytest_fusion.canary.evidence.promotion_rules import LATENCY, RULES
from pytest_fusion.canary.evidence.sequential import mean
from pytest_fusion.canary.live.comparing import call_pairs, measures
from pytest_fusion.canary.live.comparing.call_pairs import HALF, Pairs, Plan, clock_of
from pytest_fusion.canary.live.comparing.measures import Budget, Referee
from tests.canary.kernels import Kernel, Patient, double, made, observed
from tests.sweeps import sweep


class _Clock:
    """The host's clock, which only kernels move on: by what they take, and by what it takes to go first."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, first: float = 0.0) -> None:
        self.now = 0.0
        self.first = first
        self.runs = 0
        monkeypatch.setattr(call_pairs.time, "perf_counter", lambda: self.now)

    def kernel(self, seconds: float, call: Kernel = double) -> Kernel:
        def timed(*args: Any, **kwargs: Any) -> Any:
            self.runs += 1
            self.now += seconds
            return call(*args, **kwargs)

        return timed


class _Span:
    def __init__(self, seconds: float | None) -> None:
        self.taken = seconds

    def seconds(self) -> float | None:
        return self.taken


def _ratio(evidence: Evidence, arm: Any = "candidate") -> float:
    return mean(evidence.pooled("latency_ratio", arm).counts, LATENCY)


@sweep(("seconds", "ratio"), [(1.1, math.log(1.1)), (1.0, 0.0), (0.9, math.log(0.9))])
def test_a_candidate_is_as_slow_as_it_is(seconds: float, ratio: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """10 % slower, equal, or faster: blocks say so to the scale's step, and the incumbent beside itself says 0."""
    clock = _Clock(monkeypatch)
    kernel = made(clock.kernel(1.0), clock.kernel(seconds), Patient(), shadow=1.0, timed=1.0)
    for _ in range(300):
        kernel(torch.ones(4))
        kernel.refresh()

    evidence = kernel.evidence()
    assert evidence.pooled("latency_ratio").seen >= 8
    assert abs(_ratio(evidence) - ratio) <= LATENCY.step
    assert evidence.pooled("latency_ratio", "itself").counts.keys() == {LATENCY.index(0.0)}


def test_what_is_done_for_the_first_time_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that compiles in its first call of each shape is not slower for that."""
    clock = _Clock(monkeypatch)
    seen: set[Any] = set()

    def compiles(x: Tensor) -> Tensor:
        clock.now += 0.0 if x.shape in seen else 1000.0
        seen.add(x.shape)
        return x + x

    kernel = made(clock.kernel(1.0), clock.kernel(1.0, compiles), Patient(), shadow=1.0, timed=1.0)
    for step in range(200):
        kernel(torch.ones(1 + step % 8))
        kernel.refresh()

    assert set(kernel.evidence().pooled("latency_ratio").counts) == {LATENCY.index(0.0)}


def test_going_first_is_worth_nothing() -> None:
    """Where the second of a pair is always twice as fast, whoever it is, the block says equal."""
    pairs = Pairs(1.0)
    pairs.seed(3)
    blocks = []
    for ticket in range(400):
        plan = pairs.plan(ticket)
        assert plan is not None
        early, late = _Span(2.0), _Span(1.0)
        ours, theirs = (late, early) if plan.first else (early, late)
        pairs.add("b", plan, ours, theirs)
        blocks += pairs.ready()

    assert {block.arm for block in blocks} == {"candidate", "itself"}
    assert len(blocks) >= 14
    assert [block.ratio for block in blocks] == pytest.approx([0.0] * len(blocks))


def test_too_few_pairs_and_clocks_that_stand_still_say_nothing() -> None:
    """No block before ten pairs in either order; a pair in which no time went by is no pair."""
    pairs = Pairs(1.0)
    for first in (True, False):
        for _ in range(HALF if first else HALF - 1):
            pairs.add("b", Plan("candidate", first), _Span(1.0), _Span(1.0))
    pairs.add("b", Plan("candidate", False), _Span(0.0), _Span(1.0))

    assert list(pairs.ready()) == []


def test_pairs_wait_for_their_device_and_do_not_pile_up() -> None:
    """What is not yet known holds up nobody; behind a device that hangs no more calls are timed."""
    pairs, slow = Pairs(1.0), _Span(None)
    while pairs.plan(1) is not None:
        pairs.add("b", Plan("candidate", True), _Span(1.0), slow)

    assert list(pairs.ready()) == []
    slow.taken = 1.0
    list(pairs.ready())
    assert pairs.plan(1) is not None


def test_no_call_is_timed_at_no_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """``timed=0`` runs each kernel once, as without measuring."""
    clock = _Clock(monkeypatch)
    kernel = made(clock.kernel(1.0), clock.kernel(1.0), Patient(), shadow=1.0, timed=0.0)
    for _ in range(50):
        kernel(torch.ones(4))
    kernel.refresh()

    assert clock.runs == 100
    assert kernel.evidence().pooled("latency_ratio").seen == 0


@pytest.mark.parametrize("writes", [None, ("x",)])
def test_runs_that_are_timed_find_what_the_call_found(writes: tuple[str, ...] | None) -> None:
    """A kernel that writes its argument is run again on the values as they came, and the caller's are written once."""
    found: list[float] = []

    def doubles(x: Tensor) -> None:
        found.append(float(x[0]))
        x.mul_(2)

    judge = Patient()
    kernel = made(doubles, doubles, judge, shadow=1.0, timed=1.0, writes=writes)
    for _ in range(40):
        x = torch.full((3,), 5.0)
        kernel(x)
        assert x.tolist() == [10.0] * 3
    kernel.refresh()

    assert set(found) == {5.0}
    assert set(observed(judge)) == {"ok"}
    assert len(found) == 40 * 2 + 39 * 2
    assert set(kernel.status()["counts"]) == {"compared: ok", "itself: ok"}


def test_generators_go_on_as_if_nothing_had_been_timed() -> None:
    """Kernels that draw numbers draw the same ones in each run, and the caller's next numbers are those after one."""

    def noisy(x: Tensor) -> Tensor:
        return x + torch.rand(3) + random.random()

    def drawn(function: Kernel) -> list[float]:
        torch.manual_seed(1)
        random.seed(1)
        return [float(function(torch.zeros(3)).sum()) for _ in range(20)] + [random.random(), float(torch.rand(()))]

    judge = Patient()
    kernel = made(noisy, noisy, judge, shadow=1.0, timed=1.0)
    assert drawn(kernel) == drawn(noisy)
    kernel.refresh()
    assert set(observed(judge)) == {"ok"}
    assert set(kernel.status()["counts"]) == {"compared: ok", "itself: ok"}


def test_a_candidate_that_fails_when_it_is_run_again_has_failed() -> None:
    """Its caller has the incumbent's result, and the failure counts as one."""
    runs: list[int] = []

    def second(x: Tensor) -> Tensor:
        runs.append(1)
        if len(runs) == 3:
            raise RuntimeError("scratch is full")
        return x * 2

    judge = Patient()
    kernel = made(double, second, judge, shadow=1.0, timed=1.0)
    for _ in range(20):
        assert torch.equal(kernel(torch.ones(3)), torch.full((3,), 2.0))
    kernel.refresh()

    assert observed(judge).count("error") == 1
    assert "run again to be timed" in next(seen.reason for seen in judge.seen if seen.result == "error")


def test_an_incumbent_that_differs_from_itself_is_seen_beside_itself() -> None:
    """Its own results differ beyond the tolerance: evidence against the measurement, not against the candidate."""
    turn = [0]

    def wavering(x: Tensor) -> Tensor:
        turn[0] += 1
        return x * (2 + turn[0] % 3)

    kernel = made(wavering, double, Patient(), shadow=1.0, timed=1.0)
    for _ in range(60):
        kernel(torch.ones(3))
    kernel.refresh()

    assert kernel.evidence().pooled("violation", "itself").counts[1] >= 3


@pytest.mark.slow
@pytest.mark.parametrize(("seconds", "state"), [(1.3, "tripped"), (1.0, "shadow")])
def test_rules_send_back_what_is_slower(seconds: float, state: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With rules the process judges what it has seen at each interval, once the clock is known to favour nobody."""
    clock = _Clock(monkeypatch)
    few = [replace(one, fewest_itself=10) if one.name == "latency_ratio" else one for one in RULES.metrics]
    kernel = canary(
        "k",
        incumbent=clock.kernel(1.0),
        candidate=clock.kernel(seconds),
        policy=Policy(shadow=1.0, timed=1.0, interval_s=3600),
        rules=replace(RULES, metrics=tuple(few)),
    )
    for number in range(1500):
        kernel(torch.ones(2))
        if number % 100 == 99:
            kernel.refresh()
        if number == 700:
            assert kernel.state == "shadow"
        if kernel.state != "shadow":
            break

    assert kernel.state == state
    assert state == "shadow" or "latency_ratio: at least +28.4 %" in kernel.status()["tripped"]


def test_several_devices_have_no_one_clock() -> None:
    """A call on the host is timed by the host, one on a device by that device, one on two by nobody."""
    cpu, one, two = (torch.device(name) for name in ("cpu", "cuda:0", "cuda:1"))
    assert clock_of([cpu]) is None
    assert clock_of([cpu, one]) == one
    with pytest.raises(ValueError, match="2 devices"):
        clock_of([one, two])


def _softmax(x: Tensor) -> Tensor:
    return torch.softmax(x, -1)


def _coarse(x: Tensor) -> Tensor:
    return (_softmax(x) * (1 + 2e-5 * torch.randn(x.shape))).to(x.dtype)


def _refereed(incumbent: Kernel, candidate: Kernel, reference: Kernel = _softmax, **options: Any) -> Canary:
    spec = FusionSpec(fused=incumbent, reference=reference, inputs={"x": tensor("*batch n")}, **options)
    kernel = canary(
        "k", incumbent=incumbent, candidate=candidate, policy=Policy(shadow=1.0, interval_s=3600), spec=spec
    )
    assert kernel._measures._referee is not None
    kernel._measures._referee._budget = 1e9  # as much as it likes, for a test that does not wait
    for seed in range(40):
        kernel(torch.randn(16, 64, generator=torch.Generator().manual_seed(seed)))
        kernel.refresh()
    return kernel


@pytest.mark.parametrize(("incumbent", "candidate", "sign"), [(_softmax, _coarse, 1), (_coarse, _softmax, -1)])
def test_the_reference_says_who_is_less_accurate(incumbent: Kernel, candidate: Kernel, sign: int) -> None:
    """Errors far below the tolerance are seen, and whose they are: of a coarser candidate, and of a finer one."""
    kernel = _refereed(incumbent, candidate)
    counts = kernel.evidence().pooled("error_ratio").counts

    assert kernel.status()["counts"]["compared: ok"] == 40
    assert sum(counts.values()) >= 35
    assert sign * mean(counts, RULES.scales()["error_ratio"]) > math.log(3)


def test_an_equally_accurate_candidate_is_held_against_nothing() -> None:
    """Another order of operations, as good as the incumbent's: no ratio beyond what is promoted."""

    def other(x: Tensor) -> Tensor:
        power = torch.exp(x - x.amax(-1, keepdim=True))
        return power / power.sum(-1, keepdim=True)

    counts = _refereed(_softmax, other).evidence().pooled("error_ratio").counts
    assert sum(counts.values()) >= 35
    assert abs(mean(counts, RULES.scales()["error_ratio"])) < math.log(1.25)


def test_results_that_are_both_exact_are_equal() -> None:
    """Where neither has an error there is none to compare; one exact by luck and one rounded is no difference."""
    kernel = _refereed(lambda x: x * 2, lambda x: x + x, lambda x: x * 2)
    assert kernel.evidence().pooled("error_ratio").counts == {RULES.scales()["error_ratio"].index(0.0): 39}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_correct_rounding_of_each_dtype_is_no_error(dtype: torch.dtype) -> None:
    """Results in the dtype of the call, one rounded up and one to the nearest: within what is promoted."""
    kernel = _refereed(
        lambda x: _softmax(x.to(dtype)),
        lambda x: torch.softmax(x.to(dtype).float(), -1).to(dtype),
        lambda x: _softmax(x.to(dtype).float()).to(dtype),
    )
    counts = kernel.evidence().pooled("error_ratio").counts
    assert abs(mean(counts, RULES.scales()["error_ratio"])) < math.log(1.25)


def _raises(x: Tensor) -> Tensor:
    raise RuntimeError("no such size")


@pytest.mark.parametrize(
    ("reference", "what"),
    [
        (_raises, "not judged by the reference: RuntimeError: no such size"),
        (lambda x: torch.rand(x.shape), "not judged by the reference: DrawsError: it draws random numbers"),
        (lambda x: x.sum(-1), "not judged by the reference: ValueError: the reference returns other shapes"),
    ],
    ids=["raises", "draws", "shape"],
)
def test_a_reference_that_cannot_say_gives_no_ratio(reference: Kernel, what: str) -> None:
    """It is counted, with its reason, and is held against neither kernel."""
    kernel = _refereed(_softmax, _coarse, reference)
    counts = kernel.status()["counts"]

    assert kernel.evidence().pooled("error_ratio").seen == 0
    assert [name for name in counts if name.startswith(what)]
    assert kernel.state == "shadow"
    assert "draws" not in what or counts[what] == 1, "a reference that draws is not asked again"


def test_a_call_that_cannot_be_copied_twice_is_served_and_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where memory is enough for one set of copies and not for two, there is no latency; nothing else is missing."""

    def scarce(*args: Any, **kwargs: Any) -> Any:
        raise torch.OutOfMemoryError("no memory")

    judge = Patient()
    kernel = made(double, lambda x: x + x, judge, shadow=1.0, timed=1.0)
    kernel(torch.ones(3))
    monkeypatch.setattr(measures, "copies_of", scarce)
    for _ in range(5):
        assert torch.equal(kernel(torch.ones(3)), torch.full((3,), 2.0))
    kernel.refresh()

    assert observed(judge) == ["ok"] * 6
    assert kernel.status()["counts"] == {"compared: ok": 6, "not timed: OutOfMemoryError: no memory": 5}


def test_two_threads_that_look_count_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A refresh while the canaries' own thread judges a call: the call is one observation."""
    spec = FusionSpec(fused=_softmax, reference=_softmax, inputs={"x": tensor("*batch n")})
    options = Policy(shadow=1.0, timed=0.0, interval_s=3600)
    kernel = canary("k", incumbent=_softmax, candidate=_coarse, policy=options, spec=spec)
    inside, others = threading.Event(), []
    judged = Referee._judged

    def slow(self: Referee, taken: Any) -> float:
        if not inside.is_set():
            inside.set()
            others.append(threading.Thread(target=kernel.refresh))
            others[0].start()
            others[0].join(0.3)  # without a lock it would have judged the same call by now
        return judged(self, taken)

    monkeypatch.setattr(Referee, "_judged", slow)
    for _ in range(2):
        kernel(torch.randn(16, 64))
    kernel.refresh()
    others[0].join()

    assert kernel.evidence().pooled("error_ratio").seen == 1


def test_a_budget_is_kept_on_average() -> None:
    """Over a long time what is spent is the share, though no call's cost is known before it; a debt is paid back."""
    now = [0.0]
    budget, spent = Budget(0.01, lambda: now[0]), 0.0
    for second in range(2000):
        now[0] = float(second)
        cost = (0.005 if second % 2 else 0.3) if budget.open else 0.0
        spent += cost
        budget.spend(cost)

    assert 0.8 * 20 <= spent <= 1.05 * 20 + 0.3


def test_a_budget_saves_nothing_up() -> None:
    """After a quiet hour a burst is looked at for what one second is worth, not for the hour's share."""
    now = [0.0]
    budget = Budget(0.01, lambda: now[0])
    now[0] = 3600.0
    budget.spend(0.0)
    budget.spend(0.011)
    assert not budget.open


def test_no_limit_and_no_gpu_are_always_open() -> None:
    """A share of 1 is no limit; on the host, where no time of a GPU is spent, nothing is shut."""
    budget = Budget(1.0, lambda: 0.0)
    budget.spend(1e9)
    assert budget.open

    judge = Patient()
    kernel = made(double, lambda x: x + x, judge, shadow=1.0, gpu_share=1e-9)
    for _ in range(20):
        kernel(torch.ones(3))
        kernel.refresh()
    assert observed(judge) == ["ok"] * 20


def test_over_budget_calls_are_served_and_not_looked_at() -> None:
    """In shadow they are counted as skipped, routed they are served unverified; a new shape is learned all the same."""
    judge = Patient()
    kernel = made(double, lambda x: x + x, judge, shadow=1.0)
    kernel._measures.budget.spend(10.0)
    for _ in range(3):
        assert torch.equal(kernel(torch.ones(3)), torch.full((3,), 2.0))
    kernel.refresh()
    assert observed(judge) == []
    assert kernel.status()["counts"] == {"skipped: over its share of GPU time": 3}

    routed = made(double, lambda x: x + x, judge, state="full", verify=1.0)
    routed._measures.budget.spend(10.0)
    for _ in range(3):
        routed(torch.ones(3))
    routed.refresh()
    assert observed(judge) == ["ok"], "the first call of its shape, which the incumbent served"
    assert routed.status()["counts"]["served by the candidate"] == 2


def test_a_candidate_that_hangs_when_it_is_timed_is_interrupted() -> None:
    """The run that is only for the clock has a watchdog too: the caller has its result, and the candidate is out."""
    runs: list[int] = []

    def candidate(x: Tensor) -> Tensor:
        runs.append(1)
        while len(runs) >= 3:
            pass
        return x * 2

    kernel = made(double, candidate, shadow=1.0, timed=1.0, timeout_s=0.05, interval_s=0.02)
    for _ in range(4):
        assert torch.equal(kernel(torch.ones(2)), torch.full((2,), 2.0))

    assert kernel.state == "tripped"
    assert "hang" in kernel.status()["tripped"]


def test_32_threads_that_are_timed_mix_nothing_and_lose_nothing() -> None:
    """Each gets its own results; every call is compared or known not to be, and no pair is between two threads."""
    kernel = made(double, lambda x: x + x, Patient(), shadow=1.0, timed=1.0, writes=None)
    kernel(torch.ones(8))
    wrong: list[float] = []
    start = threading.Barrier(32)

    def work(number: int) -> None:
        start.wait()
        for step in range(12):
            value = float(100 * number + step)
            if not torch.equal(kernel(torch.full((8,), value)), torch.full((8,), 2 * value)):
                wrong.append(value)
            if step % 4 == 0:
                kernel.refresh()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(32)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    kernel.refresh()
    counts, evidence = kernel.status()["counts"], kernel.evidence()

    assert wrong == []
    assert counts["compared: ok"] + counts.get("skipped: the device is behind", 0) == 32 * 12 + 1
    assert set(counts) <= {"compared: ok", "itself: ok", "skipped: the device is behind"}
    assert evidence.calls == {"float32[2^3]": 32 * 12 + 1}
    assert evidence.pooled("violation").counts == {0: counts["compared: ok"]}
    assert evidence.pooled("latency_ratio").seen >= 5
