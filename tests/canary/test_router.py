"""The canary as the serving process sees it: whose result a call gets, and what the caller never notices."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor

from pytest_fusion.canary import Canary, request
from pytest_fusion.canary.evidence.observation import FirstFaults, Observation
from pytest_fusion.errors import CanaryError
from tests.canary.kernels import Kernel, Patient, added, double, made, observed


def test_off_never_calls_the_candidate() -> None:
    """Off is the incumbent alone, called with what came."""
    seen: list[Tensor] = []
    kernel = made(lambda x: seen.append(x) or x, lambda x: pytest.fail("called"), state="off")
    x = torch.ones(3)

    assert kernel(x) is x
    assert seen[0] is x
    assert kernel.status()["calls"] == 0


def test_shadow_returns_the_incumbents_result_and_passes_an_equal_candidate() -> None:
    """A candidate that rounds alike is compared on every sampled call and held against nothing."""
    judge = Patient()
    kernel = made(double, added, judge, shadow=1.0)
    x = torch.randn(5, 7).t()

    results = [kernel(x) for _ in range(4)]
    kernel.refresh()

    assert all(torch.equal(result, x * 2) for result in results)
    assert observed(judge) == ["ok"] * 4
    assert judge.seen[0].elements == 2 * 35, "the result, and what became of the argument"


def test_shadow_at_no_budget_compares_nothing() -> None:
    """Without a comparison there is no verdict on the candidate: nothing is counted as right."""
    judge = Patient()
    kernel = made(double, added, judge, shadow=0.0)

    for _ in range(50):
        kernel(torch.ones(2))
    kernel.refresh()

    assert judge.seen == []
    assert kernel.status()["calls"] == 50


@pytest.mark.parametrize(
    ("candidate", "result"),
    [
        (lambda x: x * 2.01, "violation"),
        (lambda x: torch.where(x > 0, torch.inf, x * 2), "nonfinite"),
        (lambda x: (x * 2)[:-1], "structure"),
        (lambda x: (x * 2).double(), "structure"),
        (lambda x: x.mul_(2), "violation"),
        (lambda x: 1 / 0, "error"),
    ],
    ids=["values", "nonfinite", "shape", "dtype", "input", "raises"],
)
def test_shadow_sees_what_is_wrong_and_the_caller_does_not(candidate: Kernel, result: str) -> None:
    """Whatever the candidate does, the call returns the incumbent's result and its argument is as it was."""
    judge = Patient()
    kernel = made(double, candidate, judge, shadow=1.0)
    x = torch.arange(1.0, 9.0)

    served = kernel(x)
    kernel.refresh()

    assert torch.equal(served, torch.arange(1.0, 9.0) * 2)
    assert torch.equal(x, torch.arange(1.0, 9.0))
    assert observed(judge) == [result]


def test_a_write_that_nobody_declared_is_seen_to_the_bit() -> None:
    """With ``writes=()`` a change far below any tolerance is a fault of the candidate."""

    def nudges(x: Tensor) -> Tensor:
        result = x * 2
        x[0] = torch.nextafter(x[0], torch.tensor(9.0))
        return result

    kernel = made(double, nudges, shadow=1.0, writes=())
    kernel(torch.ones(4))
    kernel.refresh()

    assert kernel.state == "tripped"
    assert "argument 'x' was changed" in kernel.status()["tripped"]


def test_scratch_is_not_compared() -> None:
    """An argument whose contents mean nothing afterwards is held against nobody."""

    def incumbent(x: Tensor, workspace: Tensor) -> Tensor:
        workspace.fill_(7)
        return x * 2

    judge = Patient()
    kernel = made(incumbent, lambda x, workspace: x + x, judge, shadow=1.0, scratch=("workspace",))
    kernel(torch.ones(4), torch.zeros(3))
    kernel.refresh()

    assert observed(judge) == ["ok"]


def test_faults_trip_and_the_trip_is_latched() -> None:
    """Three wrong results send the candidate back, and no call, state or refresh brings it back but a new rollout."""
    calls: list[int] = []
    kernel = made(double, lambda x: calls.append(1) or x * 3, shadow=1.0)
    for _ in range(2):
        kernel(torch.ones(4))
    kernel.refresh()
    assert kernel.state == "shadow"

    kernel(torch.ones(4))
    kernel.refresh()
    assert kernel.set_state("full") == "tripped"
    kernel.refresh()

    assert kernel.state == "tripped"
    assert torch.equal(kernel(torch.ones(4)), torch.full((4,), 2.0))
    assert len(calls) == 3
    with pytest.raises(CanaryError, match="'1' is running already"):
        kernel.rearm("1")
    kernel.rearm("2")
    assert kernel.state == "full"


def test_a_share_is_sticky_by_request() -> None:
    """All calls of a request are served by one kernel, another canary of the same rollout decides alike, and about the
    share of the requests goes to the candidate."""
    one, other = (
        made(lambda x: "old", lambda x: "new", Patient(), state="route", share=0.25, verify=0.0) for _ in range(2)
    )
    x = torch.ones(1)

    def served(kernel: Canary) -> list[str]:
        found = []
        for key in range(400):
            with request(key):
                kernel(x)  # the first call of its shape is the incumbent's
                answers = {kernel(x) for _ in range(3)}
            assert len(answers) == 1
            found += answers
        return found

    first = served(one)
    assert first == served(other)
    assert 60 < first.count("new") < 140
    assert [one.decide(key) == "candidate" for key in range(400)] == [answer == "new" for answer in first]


def test_a_larger_share_contains_the_smaller_one() -> None:
    """A request that the candidate served goes on being served by it while the share grows."""
    kernel = made(double, added, state="route", share=0.1)
    few = {key for key in range(300) if kernel.decide(key) == "candidate"}
    kernel.set_state("route 0.5")

    assert few < {key for key in range(300) if kernel.decide(key) == "candidate"}


def test_a_call_of_unknown_shape_is_compared_before_it_is_routed() -> None:
    """The candidate serves no shape whose result the incumbent has not shown."""
    served: list[str] = []
    kernel = made(lambda x: served.append("old") or x * 2, lambda x: served.append("new") or x * 2, state="full")

    kernel(torch.ones(3))
    assert served == ["old", "new"]
    kernel(torch.ones(4))
    assert served == ["old", "new", "old", "new"]


@pytest.mark.parametrize("writes", [None, ("x", "state")])
def test_a_candidate_that_fails_half_way_leaves_the_inputs_as_they_came(writes: tuple[str, ...] | None) -> None:
    """The incumbent runs on untouched inputs, strided and nested ones too, after the candidate wrote and raised."""
    fail = [False]

    def incumbent(x: Tensor, state: list[Tensor]) -> Tensor:
        state[0].add_(1)
        return x * 2

    def candidate(x: Tensor, state: list[Tensor]) -> Tensor:
        state[0].add_(1)
        if fail[0]:
            x.fill_(-1)
            state[0].zero_()
            raise RuntimeError("out of resource: shared memory")
        return x * 2

    kernel = made(incumbent, candidate, state="full", writes=writes, verify=0.0)
    base = torch.arange(24.0).reshape(4, 6)
    x, state = base[:, ::2], [torch.zeros(3)]
    kernel(x, state)
    fail[0] = True

    served = kernel(x, state)

    assert torch.equal(served, torch.arange(24.0).reshape(4, 6)[:, ::2] * 2)
    assert torch.equal(base, torch.arange(24.0).reshape(4, 6))
    assert torch.equal(state[0], torch.full((3,), 2.0))
    assert kernel.status()["counts"]["fallbacks"] == 1


def test_a_write_against_the_declaration_is_not_papered_over() -> None:
    """With nothing kept to fall back on, a failed candidate that wrote an argument is an error, and a trip."""
    fail = [False]

    def candidate(x: Tensor) -> Tensor:
        if fail[0]:
            x.zero_()
            raise RuntimeError("refused")
        return x * 2

    kernel = made(double, candidate, state="full", writes=(), verify=0.0)
    kernel(torch.ones(3))
    fail[0] = True

    with pytest.raises(CanaryError, match=r"refused.*leave writes=None"):
        kernel(torch.ones(3))
    assert kernel.state == "tripped"


def test_a_wrong_shape_is_never_served() -> None:
    """A routed result of another shape than the incumbent's is dropped for the incumbent's."""
    wrong = [False]
    kernel = made(double, lambda x: (x * 2)[: 1 if wrong[0] else None], state="full", verify=0.0)
    kernel(torch.ones(3))
    wrong[0] = True

    assert kernel(torch.ones(3)).shape == (3,)
    assert kernel.state == "tripped"


def test_shapes_that_depend_on_values_are_no_fault() -> None:
    """Where the incumbent's result has the candidate's new shape too, nothing is wrong and both are served on."""
    kernel = made(lambda x: x[x > 0], lambda x: x[x > 0], state="full", verify=0.0)
    kernel(torch.tensor([1.0, 2.0]))

    for values in ([1.0, -1.0], [-1.0, -1.0], [1.0, 1.0]):
        x = torch.tensor(values)
        assert torch.equal(kernel(x), x[x > 0])
    assert kernel.state == "full"
    assert kernel.status()["counts"]["served by the candidate"] == 2


def test_an_error_that_both_kernels_raise_is_the_callers() -> None:
    """The incumbent's exception reaches the caller as ever, and the candidate is not blamed for its own."""

    def picky(x: Tensor) -> Tensor:
        if x[0] < 0:
            raise ValueError("negative")
        return x * 2

    kernel = made(picky, picky, state="full", trip_after=1, verify=0.0)
    kernel(torch.ones(2))

    with pytest.raises(ValueError, match="negative"):
        kernel(-torch.ones(2))
    assert kernel.state == "full"


def test_what_the_candidate_served_is_verified() -> None:
    """A wrong candidate is found while it serves, from calls whose incumbent runs afterwards on copies."""
    wrong = [False]
    kernel = made(double, lambda x: x * (3 if wrong[0] else 2), state="full", verify=1.0)
    kernel(torch.ones(2))
    kernel.refresh()
    wrong[0] = True

    assert torch.equal(kernel(torch.ones(2)), torch.full((2,), 3.0))
    for _ in range(2):
        kernel(torch.ones(2))
    kernel.refresh()

    assert kernel.state == "tripped"


@pytest.mark.parametrize(("every", "state"), [(600, "full"), (400, "tripped")])
def test_errors_are_counted_among_all_calls_that_were_served(every: int, state: str) -> None:
    """Three errors in 1000 served calls trip, also where only one call in a hundred is verified: fewer do not."""
    calls = [0]

    def candidate(x: Tensor) -> Tensor:
        calls[0] += 1
        if calls[0] % every == 0:
            raise RuntimeError("now and then")
        return x * 2

    kernel = made(double, candidate, state="full", verify=0.01, writes=())
    for _ in range(2500):
        kernel(torch.ones(2))
    kernel.refresh()

    assert kernel.state == state


def test_violations_are_counted_among_the_calls_that_were_compared() -> None:
    """Calls that nobody compared hide no wrong result: three of the last 1000 compared trip."""
    runs = [0]
    faults = FirstFaults(3, 1000, lambda: 100 * runs[0])
    results = ["violation" if run % 300 == 0 else "ok" for run in range(1, 901)]
    decisions = []
    for runs[0], result in enumerate(results):
        decisions.append(faults.update(Observation(result)).verdict)

    assert decisions.index("rollback") == 899


@pytest.mark.parametrize("state", ["shadow", "full"])
def test_a_candidate_that_hangs_is_interrupted_and_the_incumbent_serves(state: str) -> None:
    """A loop without end in Python is ended by the watchdog; the call returns the incumbent's result."""
    hang = [state == "shadow"]

    def candidate(x: Tensor) -> Tensor:
        while hang[0]:
            pass
        return x * 2

    kernel = made(double, candidate, state=state, shadow=1.0, verify=0.0, timeout_s=0.05, interval_s=0.02)
    kernel(torch.ones(2))
    hang[0] = True

    assert torch.equal(kernel(torch.ones(2)), torch.full((2,), 2.0))
    assert kernel.state == "tripped"
    assert "hang" in kernel.status()["tripped"]


def test_no_memory_in_shadow_pauses_and_accuses_nobody() -> None:
    """A candidate without memory in shadow is left alone for a while: nothing is known about it."""
    calls: list[int] = []

    def candidate(x: Tensor) -> Tensor:
        calls.append(1)
        raise torch.OutOfMemoryError("no")

    judge = Patient()
    kernel = made(double, candidate, judge, shadow=1.0)
    for _ in range(3):
        kernel(torch.ones(2))
    kernel.refresh()

    assert calls == [1]
    assert judge.seen == []


def test_no_memory_while_it_serves_is_the_incumbents_call() -> None:
    """A candidate without memory in route gives its call back, and counts as one that raised: three of them trip."""
    full = [False]

    def candidate(x: Tensor) -> Tensor:
        if full[0]:
            raise torch.OutOfMemoryError("no")
        return x * 2

    kernel = made(double, candidate, state="full", verify=0.0, writes=())
    x = torch.ones(2)
    kernel(x)
    full[0] = True

    assert all(torch.equal(kernel(x), x * 2) for _ in range(2))
    assert kernel.state == "full"
    assert torch.equal(kernel(x), x * 2)
    assert kernel.state == "tripped"
    assert kernel.status()["counts"]["fallbacks: error"] == 3


@pytest.mark.parametrize("state", ["shadow", "full"])
def test_a_candidate_that_hangs_in_c_holds_up_its_caller_alone(state: str) -> None:
    """No Python ends it, but all other threads have the incumbent as soon as the watchdog has seen it."""
    release, entered, results = threading.Lock(), threading.Event(), []
    hang = [False]

    def candidate(x: Tensor) -> Tensor:
        if hang[0]:
            entered.set()
            release.acquire()  # C code that does not return: no interrupt reaches it
        return x * 2

    kernel = made(double, candidate, state=state, shadow=1.0, verify=0.0, timeout_s=0.05)
    x = torch.ones(2)
    kernel(x)
    hang[0] = True
    release.acquire()
    caller = threading.Thread(target=lambda: results.append(kernel(x)))
    caller.start()
    assert entered.wait(60)
    while kernel.state != "tripped":
        kernel.refresh()

    assert torch.equal(kernel(x), x * 2)
    assert results == []
    release.release()
    caller.join(60)
    assert torch.equal(results[0], x * 2)


def test_copies_beyond_the_budget_leave_the_call_to_the_incumbent() -> None:
    """What may not be copied is neither compared nor routed, and that is counted."""
    kernel = made(double, lambda x: pytest.fail("called"), state="full", memory_mib=0.001)
    x = torch.ones(4096)

    assert torch.equal(kernel(x), x * 2)
    assert torch.equal(kernel(x), x * 2)
    assert kernel.status()["counts"] == {"not routed": 1, "skipped: too large to copy": 2}
