"""Hypothesis around a fused test: settings, pinned cases, seeds, statistics, profiles and the example database."""

from __future__ import annotations

import pytest

from tests.plugin.conftest import Project


def test_settings_above_and_below(project: Project) -> None:
    """`@settings(max_examples=...)` bounds the cases, wherever it stands."""
    project.write("""
@settings(max_examples=5)
@fused_equivalent(relu_reference, inputs=X)
def test_above(x):
    return relu(x)

@fused_equivalent(relu_reference, inputs=X)
@settings(max_examples=7)
def test_below(x):
    return relu(x)
""")

    project.run().assert_outcomes(passed=2)

    assert {name: test["cases"] for name, test in project.tests.items()} == {"test_above": 5, "test_below": 7}


@pytest.mark.parametrize("order", ["above", "below"])
def test_pinned_cases_come_first(order: str, project: Project) -> None:
    """`@example(rows=3, dtype=torch.float16)` is tried before all others, wherever it stands."""
    pinned, decorator = "@example(rows=3, dtype=torch.float16, x='step')", "@fused_equivalent(relu_reference, inputs=X)"
    lines = (pinned, decorator) if order == "above" else (decorator, pinned)
    project.write(f"""
@settings(max_examples=1)
{lines[0]}
{lines[1]}
def test_pinned(x):
    print("shape", tuple(x.shape)[0], "dtype", x.dtype, "strides", x.stride(-1))
    return relu(x)
""")

    result = project.run("-s")

    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["*shape 3 dtype torch.float16 strides 2"])


def test_a_pinned_case_that_names_nothing(project: Project) -> None:
    """An `@example` with a word that is neither a dim nor an input says what it may name, at collection."""
    project.write("""
@example(row=3)
@few
@fused_equivalent(relu_reference, inputs=X)
def test_pinned(x):
    return relu(x)
""")

    result = project.run()

    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["*@example(row=...) names no dim*(rows, hidden)*"])


SEEN = """
import json, os

@settings(max_examples=160, database=None)
@fused_equivalent(relu_reference, inputs={"x": tensor("rows hidden", values=values.normal())}, dtypes=[torch.float32])
def test_seen(x):
    if x.numel():
        with open("seen", "a") as file:
            file.write(f"{tuple(x.shape)} {x.flatten()[0].item()}\\n")
    return relu(x)
"""


@pytest.mark.slow
def test_seeds_decide_everything(project: Project) -> None:
    """Two runs with one --hypothesis-seed draw the same cases, another seed draws others, and @seed overrides both."""
    seen = project.pytester.path / "seen"

    def cases(code: str, *options: str) -> str:
        project.write(code)
        project.run(*options, fork=True).assert_outcomes(passed=1)
        text = seen.read_text()
        seen.unlink()
        return text

    pinned = SEEN.replace("@settings", "@seed(5)\n@settings")
    one, again, other = (cases(SEEN, f"--hypothesis-seed={n}") for n in (1, 1, 2))
    fixed, fixed_again = cases(pinned), cases(pinned, "--hypothesis-seed=1")

    assert one == again
    assert fixed == fixed_again
    assert len({one, other, fixed}) == 3


def test_statistics_and_profile(project: Project) -> None:
    """--hypothesis-show-statistics tells of the search, and --hypothesis-profile's max_examples bounds the cases."""
    project.pytester.makeconftest(
        "from hypothesis import settings\nsettings.register_profile('tiny', max_examples=4, phases=['generate'])\n"
    )
    project.write("""
@fused_equivalent(relu_reference, inputs=X)
def test_profile(x):
    return relu(x)

@settings(max_examples=140)
@fused_equivalent(relu_reference, inputs={"x": tensor("2")}, dtypes=[torch.float32])
def test_search(x):
    return relu(x)
""")

    result = project.run("--hypothesis-profile=tiny", "--hypothesis-show-statistics", fork=True)

    result.assert_outcomes(passed=2)
    assert project.tests["test_profile"]["cases"] == 4
    assert project.tests["test_search"]["cases"] > 4
    result.stdout.fnmatch_lines(["*Hypothesis Statistics*", "*test_it.py::test_search:*", "*during generate phase*"])


@pytest.mark.slow
def test_a_found_failure_is_tried_first_next_time(project: Project) -> None:
    """The next run tries the failing case first; once it passes it is forgotten, as is one of a spec that changed."""
    bad = (
        "\n@fused_equivalent(relu_reference, inputs=X)\ndef test_it(x):\n    return relu(x)*(1 + (x.shape[-1] > 40))\n"
    )
    good = bad.replace("(1 + (x.shape[-1] > 40))", "1").replace("@fused", "@few\n@fused")
    # Where CI is detected, Hypothesis loads a profile that keeps no database.
    local = ("--hypothesis-profile", "default")
    # The database belongs to the process: what an earlier run of this very test left there is forgotten first.
    project.write(good)
    project.run(*local)
    project.write(bad)

    project.run(*local)
    first = project.tests["test_it"]
    project.run(*local)
    second = project.tests["test_it"]

    assert (first["verdict"], first["notes"]) == ("fail", [])
    assert first["cases"] > 1
    assert (second["verdict"], second["case"]) == ("fail", first["case"])
    assert "failed in an earlier run too, and was tried first" in second["message"]

    project.write(good)
    project.run(*local)
    project.write(bad)
    project.run(*local)

    assert project.tests["test_it"]["notes"] == []

    project.write(bad.replace("inputs=X", "inputs=X, dims={'hidden': dim(max=60, multiple_of=50)}"))
    project.run(*local)

    assert (project.tests["test_it"]["verdict"], project.tests["test_it"]["notes"]) == ("fail", [])


@pytest.mark.slow
def test_without_a_database_nothing_is_kept(project: Project) -> None:
    """`@settings(database=None)` holds for failing cases too."""
    project.write("""
@settings(database=None)
@fused_equivalent(relu_reference, inputs=X)
def test_it(x):
    return wrong(x)
""")

    project.run()
    project.run()

    assert project.tests["test_it"]["notes"] == []


def test_hypothesis_is_not_asked_about_a_test_with_no_plugin(project: Project) -> None:
    """With Hypothesis's own plugin switched off, settings and pinned cases still count."""
    project.write("""
@settings(max_examples=3)
@example(rows=2)
@fused_equivalent(relu_reference, inputs=X)
def test_it(x, tmp_path):
    return relu(x)
""")

    project.run("-p", "no:hypothesispytest", fork=True).assert_outcomes(passed=1)

    assert project.tests["test_it"]["cases"] == 3
