"""All cases of one test: pinned ones first, boundaries, search; then the minimum and what is told of it."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import Phase, example, settings
from hypothesis import strategies as st

from pytest_fusion.case.case_model import Case
from pytest_fusion.case.choosing import search
from pytest_fusion.case.stated import stated_case
from pytest_fusion.checks import registry
from pytest_fusion.checks.case_judge import CaseResult, judge_case
from pytest_fusion.checks.context import Focus
from pytest_fusion.engine import judging
from pytest_fusion.engine.campaign import Campaign
from pytest_fusion.engine.job import Job
from pytest_fusion.engine.modes import Judge
from pytest_fusion.engine.pace import CALL, Pace
from pytest_fusion.engine.profiles import PROFILES, Profile
from pytest_fusion.engine.request import Request
from pytest_fusion.engine.tally import Tally
from pytest_fusion.errors import SpecError
from pytest_fusion.plugin.testing import examine
from pytest_fusion.report.record import TestRecord
from pytest_fusion.run import compilers
from pytest_fusion.run.process.shared_cases import Shared
from pytest_fusion.spec import values
from pytest_fusion.spec.dims import dim
from pytest_fusion.spec.fusion_spec import FusionSpec
from pytest_fusion.spec.inputs import optional, tensor
from tests.sweeps import sweep

T = torch.Tensor


def double(x: T) -> T:
    return x * 2


def campaign(
    fused: Any = double,
    *decorators: Any,
    inputs: Any = None,
    cases: int | None = 8,
    seed: int | None = 0,
    drawn: int | None = None,
    dry: bool = False,
    profile: Profile = PROFILES["dev"],
    **keywords: Any,
) -> Campaign:
    def outer() -> None: ...

    for decorate in decorators:
        outer = decorate(outer)
    search.adopt(outer, outer)
    spec = FusionSpec(
        fused=fused,
        reference=keywords.pop("reference", double),
        inputs=inputs or {"x": tensor("rows hidden")},
        **keywords,
    )
    request = Request("test", profile=profile, seed=seed, max_cases=cases)
    return Campaign(spec, request, outer, {}, drawn=drawn, dry=dry)


def seen_by(*decorators: Any, **keywords: Any) -> tuple[list[tuple[tuple[int, ...], torch.dtype]], Tally]:
    """Shape and dtype of each new input, in order, and the tally."""
    seen: list[tuple[tuple[int, ...], torch.dtype]] = []

    def fused(x: T) -> T:
        if not seen or seen[-1] != (tuple(x.shape), x.dtype):
            seen.append((tuple(x.shape), x.dtype))
        return x * 2

    return seen, campaign(fused, *decorators, **keywords).run()


def test_pinned_examples_run_first_in_the_sizes_they_name() -> None:
    """``@example`` gives sizes, a dtype, a regime and a layout."""
    seen, tally = seen_by(example(rows=3, hidden=71, dtype=torch.bfloat16, values="nan", x="transposed"), cases=2)
    assert seen[0] == ((3, 71), torch.bfloat16)
    assert tally.failure is None


def test_a_pinned_example_may_cost_more_than_a_generated_case() -> None:
    """Its sizes are not halved to fit the limits of a profile."""
    case = stated_case(campaign().cases.plan, {"rows": 3, "hidden": 1_000_000}, 0, where="@example")
    assert dict(case.sizes) == {"rows": 3, "hidden": 1_000_000}


@pytest.mark.parametrize(
    ("pinned", "part"),
    [
        ({"row": 3}, "names no dim"),
        ({"rows": 3}, "rows=3, which Dim"),
        ({"dtype": torch.float64}, "not one of dtypes="),
        ({"dtype": "flaot16"}, "did you mean 'float16'"),
        ({"values": "nans"}, "did you mean 'nan'"),
        ({"x": "transpose"}, "did you mean 'transposed'"),
    ],
    ids=str,
)
def test_a_pinned_example_that_cannot_be_is_an_error(pinned: dict[str, Any], part: str) -> None:
    """A misspelt or impossible example raises instead of running something else."""
    with pytest.raises(SpecError, match=part):
        campaign(double, example(**pinned), dims={"rows": dim(multiple_of=8)}).run()


def test_a_pinned_example_may_leave_out_an_optional() -> None:
    """``@example(b=None)`` is the case without ``b``."""
    absent: list[bool] = []

    def add(x: T, b: T | None) -> T:
        absent.append(b is None)
        return x * 2 if b is None else x * 2 + b

    inputs = {"x": tensor("n"), "b": optional(tensor("n"))}
    campaign(add, example(n=3, b=None), inputs=inputs, reference=add, cases=1).run()
    assert set(absent) == {True}


def test_the_number_of_cases_is_the_users() -> None:
    """``@settings(max_examples)`` bounds all phases together; a phase that is switched off does not run."""
    assert campaign(double, settings(max_examples=6), cases=None).run().cases == 6
    only = campaign(double, example(rows=2, hidden=2), settings(phases=[Phase.explicit]), cases=None).run()
    assert only.cases == 1


def test_equal_seeds_run_equal_cases() -> None:
    """The seed decides sizes and values of every case."""
    runs = [seen_by(cases=6, seed=seed)[0] for seed in (1, 1, 2)]
    assert runs[0] == runs[1]
    assert runs[0] != runs[2]


def test_a_failure_ends_the_run_and_is_shrunk() -> None:
    """No case runs after the first failure but those that shrink it, and the minimum is exact."""

    def fused(x: T) -> T:
        return x * (2 if x.shape[0] < 4 or x.shape[1] < 3 else 3)

    tally = campaign(fused, cases=40).run()
    assert tally.failure is not None
    assert tally.failure.case is not None
    assert dict(tally.failure.case.sizes) == {"rows": 4, "hidden": 3}
    assert tally.failure.shrink_runs > 0
    assert tally.cases == tally.judged + sum(tally.rejected.values())


@pytest.mark.slow
def test_checks_after_the_one_that_failed_are_not_run_while_shrinking() -> None:
    """A case that no longer shows a wrong value ends where that was found; what follows would cost most of its time."""
    run = campaign(lambda x: x * 2 if x.shape[1] < 30 else x * 2 + 1, cases=40)
    failure = run.run().failure
    assert failure is not None
    assert failure.verdict.check == "values"
    assert failure.case is not None
    case = failure.case.with_(sizes={"rows": 3, "hidden": 5})
    reached = {
        until: judge_case(replace(run.judging.context, focus=Focus(until=until)), case).reached
        for until in (None, "", "invariance")
    }
    assert reached == {None: "malformed", "": "", "invariance": "invariance"}


def test_without_the_shrink_phase_the_first_failing_case_is_reported() -> None:
    """``@settings(phases=...)`` without shrink keeps the case as it was found."""
    phases = settings(phases=[Phase.generate])
    tally = campaign(lambda x: x * (3 if x.numel() > 20 else 2), phases, cases=30).run()
    assert tally.failure is not None
    assert tally.failure.shrink_runs == 0


@pytest.mark.slow
def test_a_spec_error_met_while_shrinking_does_not_hide_the_finding() -> None:
    """A reference that cannot bear a smaller case ends that attempt, not the report."""

    def reference(x: T) -> T:
        if 0 < x.numel() < 5:
            x.add_(1)
        return x * 2

    tally = campaign(lambda x: x * 3, inputs={"x": tensor("rows")}, reference=reference).run()
    assert tally.failure is not None
    assert tally.failure.case is not None
    assert dict(tally.failure.case.sizes) == {"rows": 5}


def test_sizes_that_are_impossible_together_are_counted() -> None:
    """A shape that is negative for some sizes rejects those cases by name and judges the others."""
    tally = campaign(double, inputs={"x": tensor("n-3")}, cases=30).run()
    assert tally.failure is None
    assert tally.rejected["impossible"] > 0
    assert tally.judged > 0


def record_of(fused: Any, root: Path, **keywords: Any) -> TestRecord:
    def outer() -> None: ...

    search.adopt(outer, outer)
    spec = FusionSpec(fused=fused, reference=double, inputs={"x": tensor("rows hidden")}, name="scale", **keywords)
    return Judge().run(Job(spec, Request("test_scale", isolate="off", root=root, max_cases=12, first=True), outer, {}))


def test_a_record_names_every_check_and_never_passes_what_was_not_run(tmp_path: Path) -> None:
    """Each check of the contract has a verdict and, unless it passed, a reason."""
    record = record_of(double, tmp_path)
    assert set(record.checks) == set(registry.names())
    assert record.verdict == "pass", record.message
    for name, entry in record.checks.items():
        assert entry["verdict"] in ("pass", "unknown")
        assert entry["verdict"] == "pass" or entry["reason"], name
        assert entry["verdict"] == "unknown" or entry["cases"] > 0, name


def test_a_failing_record_holds_its_case_and_a_replay_file(tmp_path: Path) -> None:
    """The file written replays the case that the record describes."""
    from pytest_fusion.diagnosis.repro.replay_file import read

    record = record_of(lambda x: (x * 2).double(), tmp_path)
    assert record.verdict == "fail"
    assert record.case is not None
    assert record.replay is not None
    replay = read(Path(record.replay))
    assert replay.check == record.failed_check == "structure"
    assert dict(replay.case.sizes) == record.case["dims"]


@pytest.mark.slow
@pytest.mark.parametrize("profile", [PROFILES["dev"], PROFILES["dev"].counted], ids=["timed", "counted"])
def test_compiling_ahead_shares_the_covering_phase(profile: Profile) -> None:
    """Workers reach what the test covers, in its order; where all cases are run, long rows before others."""
    seen: list[tuple[int, ...]] = []

    def fused(x: T) -> T:
        seen.append(tuple(x.shape))
        return x * 2

    shares = []
    for worker in range(2):
        seen.clear()
        run = campaign(fused, inputs={"x": tensor("*batch hidden")}, cases=None, profile=profile)
        run.judging.dry = True
        run.compile_share(itertools.count(worker, 2))
        shares.append(seen[2:])  # the probe's two cases are every worker's
    seen.clear()
    campaign(fused, inputs={"x": tensor("*batch hidden")}, cases=None).run()

    longest = max(max(shape) for shape in seen if 0 not in shape)
    assert longest > 60_000
    assert (longest in shares[0][0]) == (profile.budget_s == math.inf)
    assert set(shares[0]) | set(shares[1]) <= set(seen)
    assert min(map(len, shares)) > 15


@pytest.mark.slow
@pytest.mark.parametrize("slow", [False, True])
def test_a_slow_kernel_is_not_called_hanging(slow: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its longest cases are not begun and told as too expensive; a fast one has them."""
    widths: set[int] = set()

    def fused(x: T) -> T:
        widths.add(x.shape[-1])
        return x * 2

    class Slow(Pace):
        def note(self, choice: Mapping[str, Any], _: float, what: str = CALL) -> None:
            longest = max((v for v in choice.values() if isinstance(v, int)), default=0)
            super().note(choice, 1e-3 * longest if what == CALL else 0.0, what)

    if slow:
        monkeypatch.setattr("pytest_fusion.engine.cases.Pace", Slow)
    tally = campaign(fused, inputs={"x": tensor("rows n")}, cases=None).run()
    assert tally.failure is None
    assert (max(widths) > 65000, tally.rejected.get("too-expensive", 0) > 0) == (not slow, slow)


@pytest.mark.slow
@pytest.mark.parametrize("wrong", [False, True])
def test_a_slow_reference_is_no_hang_of_the_kernel(wrong: bool) -> None:
    """Its longest cases are told as too expensive; what is wrong in shorter ones is found."""

    def reference(x: T) -> T:
        begun = time.process_time()
        while x.shape[-1] > 1000 and time.process_time() - begun < 0.35:
            pass
        return x * 2

    def fused(x: T) -> T:
        return x * (1 if wrong and x.shape[-1] > 200 else 2)

    dims = {"rows": dim(1, 3)}
    run = campaign(fused, reference=reference, inputs={"x": tensor("rows n")}, dims=dims, cases=None, grad=True)
    run.judging.context = replace(run.judging.context, reference_s=0.3)
    tally = run.run()
    if wrong:
        assert tally.failure is not None
        assert tally.failure.verdict.check == "values"
        return
    assert tally.failure is None
    assert tally.rejected.get("too-expensive", 0) > 0
    assert tally.checks["gradients"]["verdict"] == "pass"


@sweep("honest", [False, True], fast=("True",))
def test_what_is_wrong_for_many_rows_of_several_blocks_alone_is_found(honest: bool, tmp_path: Path) -> None:
    """Neither a long dim beside a small one nor two of three blocks of 64 show it."""

    def fused(x: T) -> T:
        y = x.float().exp2().to(x.dtype)
        if not honest and x.shape[0] > 512 and x.shape[1] > 128:
            y[512:, 128:] = 0.0
        return y

    inputs = {"x": tensor("rows n", values=values.finite())}
    spec = FusionSpec(
        name="broad", fused=fused, reference=lambda x: x.float().exp2().to(x.dtype), inputs=inputs, dtypes=torch.float32
    )
    found = examine(spec, device="cpu", seed=0, root=tmp_path, first=True)
    assert (found.verdict, found.failed_check) == (("pass", None) if honest else ("fail", "values"))


@pytest.mark.slow
@pytest.mark.parametrize("forgotten", ["a flag", "a stride"])
def test_what_only_long_rows_forget_is_found(forgotten: str, tmp_path: Path) -> None:
    """A path for rows past 1000 columns, in Python so that no block size is known, is right for plain cases alone."""

    def reference(x: T, centre: bool) -> T:
        wide = x.float() - x.float().mean(-1, keepdim=True) if centre else x.float()
        return wide.exp2().to(x.dtype)

    def fused(x: T, centre: bool) -> T:
        if x.shape[-1] <= 1000:
            return reference(x, centre)
        if forgotten == "a flag":
            return reference(x, False)
        return reference(x if x.stride(-1) == 1 else x.flip(-1), centre)

    inputs = {"x": tensor("rows n", values=values.finite()), "centre": st.booleans()}
    spec = FusionSpec(name="long", fused=fused, reference=reference, inputs=inputs)
    found = examine(spec, device="cpu", seed=0, root=tmp_path, first=True)
    assert (found.verdict, found.failed_check) == ("fail", "values")


@pytest.mark.slow
@pytest.mark.parametrize("decorators", [(), (settings(derandomize=True, max_examples=100),)], ids=["drawn", "derived"])
def test_workers_compile_what_the_covering_phase_and_half_of_the_search_launch(
    decorators: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where no seed is asked for the search has another one in each run, but one that its workers share; each case is
    one worker's."""
    judged: list[str] = []
    compiled: list[str] = []

    def judge(context: Any, case: Case, *, again: bool) -> CaseResult:
        judged.append(case.key())
        return judge_case(context, case, again=again)

    def dry(context: Any, case: Case) -> CaseResult:
        compiled.append(case.key())
        return CaseResult(case, rejected="dry run")

    monkeypatch.setattr(judging, "judge_case", judge)
    monkeypatch.setattr(judging, "dry_run", dry)
    keywords = {"seed": None, "cases": None, "dims": {"rows": dim(0, 9), "hidden": dim(0, 40)}}
    campaign(double, *decorators, drawn=7, **keywords).run()
    shared = Shared()
    for worker in range(2):
        run = campaign(double, *decorators, drawn=7, dry=True, **keywords)
        run.ahead = shared
        run.compile_share(itertools.count(worker, 2))

    ahead = sum(key in compiled for key in judged)
    assert ahead >= len(judged) - PROFILES["dev"].search // 2 - 3
    assert len(set(compiled)) >= len(compiled) - 8  # the probes, and what is met twice


@pytest.mark.slow
@pytest.mark.parametrize(("most", "said"), [(1, True), (256, False)])
def test_a_compiled_function_that_is_compiled_no_more_is_told(
    monkeypatch: pytest.MonkeyPatch, most: int, said: bool
) -> None:
    """Past its limit torch.compile runs what it was given, so that a test compares the reference with itself."""

    def reference(x: T) -> T:
        return x * 3

    monkeypatch.setattr(compilers, "_RECOMPILES", most)
    compiled = torch.compile(reference, backend="eager", dynamic=False)
    found = examine(FusionSpec(name="compiled", fused=compiled, reference=reference, inputs={"x": tensor("n")}))
    notes = [note for note in found.notes if f"torch.compile stopped after {most} variants of 'reference'" in note]
    assert found.verdict == "pass", found.message
    assert bool(notes) == said, found.notes


@pytest.mark.slow
def test_whether_a_case_fails_is_told_without_what_comes_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A failing test asks it of a new process, which made its whole diagnosis a second time: 5 s of 10."""
    run = campaign(lambda x: x + 2)
    failure = run.run().failure
    assert failure is not None
    assert failure.case is not None
    case = failure.case
    explained = campaign(lambda x: x + 2).replay(case)
    monkeypatch.setattr(
        "pytest_fusion.engine.minimum.diagnose", lambda lab: pytest.fail("it was asked what comes of it")
    )
    bare = campaign(lambda x: x + 2).replay(case, explained=False)
    assert explained.failure is not None
    assert bare.failure is not None
    assert explained.failure.diagnosis is not None
    assert bare.failure.diagnosis is None
    assert (bare.failure.verdict, bare.failure.case) == (explained.failure.verdict, case)


def in_time(
    *, late: bool, fused: Any = double, decorators: Sequence[Any] = (), **keywords: Any
) -> tuple[list[Case], Tally]:
    """The cases of a campaign with a budget of seconds, and its tally; ``late``: they are used up from the start."""
    timed = replace(PROFILES["dev"], covering=40, search=5, budget_s=1e9)
    run = campaign(fused, *decorators, cases=None, profile=timed, **keywords)
    if late:
        run.budget.begun = -timed.budget_s
    cases: list[Case] = []
    judge = run.judging.judge

    def noted(case: Case, *, again: bool | None) -> CaseResult:
        cases.append(case)
        return judge(case, again=again)

    run.judging.judge = noted  # type: ignore[method-assign]
    return cases, run.run()


def test_a_budget_cuts_the_list_of_cases() -> None:
    """What runs are the first cases of all, twenty of them with something to compare; the report says what is left."""
    few, cut = in_time(late=True)
    every, whole = in_time(late=False)

    assert few == every[: len(few)]
    assert 20 <= cut.judged < 40 < whole.judged
    assert cut.failure is None
    assert whole.coverage.keys() == {"pairs", "covered", "share"}
    lines = cut.coverage["unmet"]
    assert cut.coverage["pairs"] - cut.coverage["covered"] == sum(len(line.split(" | ")) for line in lines)
    assert lines[0].partition(" | ")[0] in cut.notes[-1]
    assert not any("--fusion-seconds" in note for note in whole.notes)


def test_a_budget_ends_no_test_that_compared_nothing() -> None:
    """A kernel that refuses every case is wrong, however long that takes to show."""

    def refuses(x: T) -> T:
        raise NotImplementedError

    _, tally = in_time(late=True, fused=refuses, rejects=NotImplementedError)
    assert tally.judged == 0
    assert tally.failure is not None
    assert tally.failure.verdict.identity == "error:nothing-judged"


def test_pinned_examples_run_whatever_the_budget() -> None:
    """All 25 that a test states run before the budget is looked at."""
    pins = [example(rows=rows, hidden=2) for rows in range(1, 26)]
    few, _ = in_time(late=True, decorators=pins)
    assert [case.sizes["rows"] for case in few] == [*range(25, 0, -1)]


@pytest.mark.parametrize("late_s", [0.0, 1e9])
def test_a_late_failure_has_little_time(late_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shrinking has a budget too: past it a failure has the case that showed it, but for a few seconds' work."""

    def wrong(x: T) -> T:
        return x * 3 if x.numel() > 30 else x * 2

    monkeypatch.setattr(judging, "_LATE_S", late_s)
    run = campaign(wrong)
    run.judging._left_s = 0.0
    failure = run.run().failure
    assert failure is not None
    assert failure.case is not None
    assert (failure.shrink_runs > 0) is (late_s > 0)
    assert (failure.case.sizes["rows"] * failure.case.sizes["hidden"] == 40 * 40) is (late_s == 0)
