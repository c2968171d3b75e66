"""The examples of README and docs run as they stand."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pytest_fusion.checks import registry
from pytest_fusion.diagnosis.causes import CAUSES
from pytest_fusion.engine.profiles import PROFILES
from tests.forked import run_pytest
from tests.sweeps import sweep

ROOT = Path(__file__).resolve().parent.parent.parent
PAGES = ("README.md", "docs/usage.md", "docs/cpu-lane.md", "docs/bench.md", "docs/canary.md")
RECIPES = "docs/recipes.md"
IDEAS = tuple(sorted(f"docs/internals/{page.name}" for page in (ROOT / "docs/internals").glob("[a-z]*.md")))
# That an example is right takes few cases; that the search finds bugs is proved in tests/quality.
_SHORT = """
from hypothesis import settings
settings.register_profile("short", max_examples=40)
settings.load_profile("short")
"""
# Nothing is known of an earlier run.
_FIRST_TIME = _SHORT.replace("max_examples=40", "database=None")
_EXAMPLE = re.compile(r"<!-- example: (?P<verdict>\w+) -->\n```python\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\((?P<target>[^)#]*)(?:#(?P<anchor>[^)]*))?\)")
# A file or folder of the package in backticks, and a name in it, as in `case/plan.py::build`.
_PLACE = re.compile(r"`(?P<path>[\w/-]+(?:\.py|\.md|/))(?:::(?P<name>\w+))?`")
_HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)
_OPTION = re.compile(r"--fusion-[a-z]+(?:-[a-z]+)*")


def _examples_in(text: str) -> list[tuple[str, str]]:
    return [(found["verdict"], found["code"]) for found in _EXAMPLE.finditer(text)]


def _examples(page: str) -> list[tuple[str, str]]:
    return _examples_in((ROOT / page).read_text(encoding="utf-8"))


def _recipes() -> dict[str, str]:
    """The sections of the recipes' page by heading."""
    _, *sections = re.split(r"^## ", (ROOT / RECIPES).read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {title: rest for title, _, rest in (section.partition("\n") for section in sections)}


def _prose(page: Path) -> str:
    """A page without its code blocks."""
    return re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


def _anchors(page: Path) -> set[str]:
    """Anchors as GitHub makes them of headings."""
    headings = _HEADING.findall(_prose(page))
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@sweep("page", [*PAGES, *IDEAS], fast={*PAGES, *IDEAS} - {"docs/usage.md"})
def test_every_example_does_what_the_page_says(page: str, pytester: pytest.Pytester) -> None:
    """Each block marked as an example is a test file on its own, and every test in it passes."""
    _all_pass(_examples(page), pytester)


@sweep("recipe", list(_recipes()), fast={"out= arguments"})
def test_a_recipe_is_one_file_that_passes(recipe: str, pytester: pytest.Pytester) -> None:
    """Under its words to search for, a recipe has one test file, which passes as it stands."""
    section = _recipes()[recipe]
    searched, matters = section.strip().split("\n\n")[:2]

    assert len(searched.splitlines()) == 1
    assert "first failure" in " ".join(matters.split())
    examples = _examples_in(section)
    assert len(examples) == 1
    _all_pass(examples, pytester)


def _all_pass(examples: list[tuple[str, str]], pytester: pytest.Pytester) -> None:
    assert examples
    assert {verdict for verdict, _ in examples} == {"passes"}
    pytester.makeconftest(_SHORT)
    for number, (_, code) in enumerate(examples):
        pytester.path.joinpath(f"test_example_{number}.py").write_text(code, encoding="utf-8")
    tests = sum(len(re.findall(r"^def test_|^test_\w+ = ", code, re.MULTILINE)) for _, code in examples)

    result = run_pytest(pytester, "-p", "no:cacheprovider", "--fusion-device", "cpu")

    result.assert_outcomes(passed=tests)


def test_the_broken_kernel_of_the_readme_is_reported_as_shown(pytester: pytest.Pytester) -> None:
    """Its first example without the lines that the README's command takes out fails with the README's words."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (taken,) = re.findall(
        r"^sed -i '/(.*)/d' test_add_relu\.py; .venv/bin/pytest test_add_relu\.py$", text, re.MULTILINE
    )
    (shown,) = re.findall(r"^```text\n(test_add_relu: .*?)^```$", text, re.MULTILINE | re.DOTALL)
    lines = _examples("README.md")[0][1].splitlines(keepends=True)
    broken = "".join(line for line in lines if taken not in line)
    assert broken != "".join(lines)
    pytester.path.joinpath("test_add_relu.py").write_text(broken, encoding="utf-8")
    pytester.makeconftest(_FIRST_TIME)

    result = run_pytest(pytester, "-p", "no:cacheprovider", "--fusion-device", "cpu", "--fusion-first")

    result.assert_outcomes(failed=1)
    known = [line.startswith("FAIL test_add_relu.py::test_add_relu: bounds (ignores") for line in result.outlines]
    account = ["= FAILURES =" in line for line in result.outlines]
    assert known.index(True) < account.index(True)
    for line in shown.splitlines():
        assert any(seen.startswith(line.removesuffix("...")) for seen in result.outlines), line


@pytest.mark.parametrize(
    "page",
    [
        *PAGES,
        *IDEAS,
        RECIPES,
        "docs/internals/README.md",
        "docs/causes.md",
        "docs/extending.md",
        "docs/baselines.md",
        "docs/canary-judge.md",
        "examples/rollout/README.md",
        "CONTRIBUTING.md",
        "ARCHITECTURE.md",
    ],
)
def test_every_link_leads_somewhere(page: str) -> None:
    """Files and headings that a page links to exist."""
    for link in _LINK.finditer(_prose(ROOT / page)):
        target = ROOT / Path(page).parent / link["target"] if link["target"] else ROOT / page
        assert target.exists(), link[0]
        assert not link["anchor"] or link["anchor"] in _anchors(target), link[0]


@pytest.mark.parametrize("page", ["ARCHITECTURE.md", *IDEAS])
def test_every_place_in_the_code_exists(page: str) -> None:
    """Files, folders and names that a page sends its reader to are there."""
    for place in _PLACE.finditer((ROOT / page).read_text(encoding="utf-8")):
        found = [path for root in (ROOT / "pytest_fusion", ROOT) if (path := root / place["path"]).exists()]
        if place["path"].endswith("/"):
            found += (ROOT / "pytest_fusion").rglob(place["path"])
        assert found, place[0]
        if place["name"]:
            defined = rf"^(?:class |def |    def )?{place['name']}\b"
            assert re.search(defined, found[0].read_text(encoding="utf-8"), re.MULTILINE), place[0]


def test_the_map_is_short() -> None:
    """A newcomer reads the map in minutes, and each idea is one page."""
    assert len((ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8").splitlines()) <= 150
    for page in IDEAS:
        assert 60 <= len((ROOT / page).read_text(encoding="utf-8").splitlines()) <= 150, page


def test_the_table_of_checks_is_complete() -> None:
    """The checks that the page explains are those that exist."""
    section = _prose(ROOT / "docs/usage.md").partition("## What is checked")[2].partition("## Tolerance")[0]

    assert sorted(re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)) == sorted(registry.names())


def test_the_list_of_causes_is_complete() -> None:
    """Every slug that a failure may name is explained, in the order of the code."""
    text = (ROOT / "docs/causes.md").read_text(encoding="utf-8")

    assert re.findall(r"^\| `([\w-]+)` \|", text, re.MULTILINE) == list(CAUSES)


def _named_options(page: Path) -> set[str]:
    return set(_OPTION.findall(page.read_text(encoding="utf-8")))


def test_options_and_pages_agree(pytester: pytest.Pytester) -> None:
    """Every option that pytest lists is explained, and no page names one that does not exist."""
    listed = set(_OPTION.findall(run_pytest(pytester, "--help").stdout.str()))
    folders = ("docs", "examples", "benchmarks", "reference_kernels")
    pages = [*ROOT.glob("*.md"), *(page for folder in folders for page in (ROOT / folder).rglob("*.md"))]
    named = {str(page.relative_to(ROOT)): _named_options(page) for page in pages}
    del named["CHANGELOG.md"]  # it names those that were removed

    assert listed
    assert named["docs/usage.md"] == listed
    assert {page: found - listed for page, found in named.items() if found - listed} == {}


def test_an_option_is_read_to_its_end(tmp_path: Path) -> None:
    """One that does not exist is not taken for one that its name begins with."""
    page = tmp_path / "page.md"
    page.write_text("`--fusion-bench-profiles`, `--fusion-bench=1`, `--fusion-json FILE` and `--fusion-xyz`.")

    assert _named_options(page) == {"--fusion-bench-profiles", "--fusion-bench", "--fusion-json", "--fusion-xyz"}


def test_the_table_of_profiles_is_right() -> None:
    """The numbers of each profile are those of the code."""
    text = _prose(ROOT / "docs/usage.md").replace(",", "")
    rows = re.findall(r"^\| `(\w+)` \| up to (\d+) \| (\d+) \|$", text, re.MULTILINE)

    assert {name: (int(covering), int(search)) for name, covering, search in rows} == {
        name: (found.covering, found.search) for name, found in PROFILES.items()
    }
