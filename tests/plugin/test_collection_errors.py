"""A wrong spec is an error at collection: one line of the user's file and one sentence that helps."""

from __future__ import annotations

import os

import pytest

from tests import forked
from tests.plugin.conftest import HEAD, Project

BODY = "def test_it(x):\n    return x\n"
WRONG = {
    "an input that the reference does not take": (
        "@fused_equivalent(lambda y: y, inputs=X)\n" + BODY,
        "*reference <lambda>(y) does not take the input 'x'*Add 'x' to its parameters, or wrap it*",
    ),
    "an argument that nobody gives to the reference": (
        "@fused_equivalent(lambda x, bias: x, inputs=X)\n" + BODY,
        "*reference needs 'bias', which is neither an input nor a parameter of the test*",
    ),
    "a wrong keyword": (
        "@fused_equivalent(relu_reference, inputs=X, tolerence='auto')\n" + BODY,
        "*fused_equivalent() has no keyword 'tolerence'; did you mean 'tolerance'?",
    ),
    "a dim that no input has": (
        "@fused_equivalent(relu_reference, inputs=X, dims={'hiden': dim(1, 8)})\n" + BODY,
        "*bounds a dim that no input uses; did you mean 'hidden'?",
    ),
    "impossible bounds": (
        "@fused_equivalent(relu_reference, inputs=X, dims={'hidden': dim(9, 15, multiple_of=8)})\n" + BODY,
        "*dim(9, 15, multiple_of=8): no multiple of 8 in that range",
    ),
    "an unknown check": (
        "@fused_equivalent(relu_reference, inputs=X, without={'repeats': 'atomics'})\n" + BODY,
        "*names no check; did you mean 'repeat'?",
    ),
    "a requirement that is none": (
        "@fused_equivalent(relu_reference, inputs=X, requires=9.0)\n" + BODY,
        "*requires=9.0; expected 'cuda', a compute capability such as (9, 0), or a package's import name",
    ),
    "an architecture in place of a capability": (
        "@fused_equivalent(relu_reference, inputs=X, requires='sm_90')\n" + BODY,
        "*requires='sm_90'; a compute capability is written (9, 0)",
    ),
    "sizes to measure that name no dim": (
        "@fused_equivalent(relu_reference, inputs=X, bench=[{'rows': 4, 'hiden': 4}])\n" + BODY,
        "*bench= has 'hiden'; did you mean 'hidden'?",
    ),
    "a size to measure that is none": (
        "@fused_equivalent(relu_reference, inputs=X, bench=[{'rows': 4, 'hidden': 4.5}])\n" + BODY,
        "*bench(hidden=4.5); expected a whole number of 0 or more",
    ),
    "no inputs": (
        "@fused_equivalent(relu_reference)\n" + BODY,
        "*no inputs; pass inputs=*",
    ),
    "inputs that are no dict": (
        "@fused_equivalent(relu_reference, inputs=[tensor('rows')])\n" + BODY,
        "*inputs=*; expected a dict from names to inputs",
    ),
    "no reference": (
        "@fused_equivalent\n" + BODY,
        "*fused_equivalent() needs the reference first, as in @fused_equivalent(reference, inputs=...)",
    ),
    "a coroutine": (
        "@fused_equivalent(relu_reference, inputs=X)\nasync " + BODY,
        "*must be a plain function that returns the fused result*",
    ),
    "not a function": (
        "@fused_equivalent(relu_reference, inputs=X)\n@staticmethod\n" + BODY,
        "*decorates a test function, not *; put it below @staticmethod*",
    ),
    "a spec of its own": (
        "SPEC = FusionSpec(fused=relu, reference=lambda y: y, inputs=X)\n",
        "*reference <lambda>(y) does not take the input 'x'*",
    ),
    "a tensor with a wrong layout": (
        "X = tensor('rows', layouts='packed')\n",
        "*unknown layout 'packed'; did you mean 'padded'?",
    ),
    "a spec that makes a test without a valid word": (
        "test_it = FusionSpec(fused=relu, reference=relu_reference, inputs=X, without={'value': 'no'}).test()\n",
        "*names no check; did you mean 'values'?",
    ),
}


@pytest.fixture(scope="module")
def refused(tmp_path_factory: pytest.TempPathFactory) -> pytest.RunResult:
    """A run over all of them, each in a file of its own."""
    folder = tmp_path_factory.mktemp("refused")
    (folder / "pytest.ini").write_text("[pytest]\n")
    for number, (code, _) in enumerate(WRONG.values()):
        (folder / f"test_{number}.py").write_text(HEAD + code)
    options = ["-p", "no:cacheprovider", "--fusion-device", "cpu"]

    def work() -> int:
        os.chdir(folder)
        os.environ.pop("PYTEST_ADDOPTS", None)
        return pytest.main(options)

    return forked.run(work, ["pytest", *options])


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_spec_is_refused(name: str, refused: pytest.RunResult) -> None:
    """The error is a SpecError with its sentence, at the user's line, without frames of ours."""
    number, (_, line) = list(WRONG).index(name), WRONG[name]
    _, _, section = refused.stdout.str().partition(f"ERROR collecting test_{number}.py _")
    section, _, _ = section.partition("ERROR collecting ")

    assert refused.ret == pytest.ExitCode.INTERRUPTED
    pytest.LineMatcher(section.splitlines()).fnmatch_lines([f"*test_{number}.py:*: in <module>*", line])
    refused.stdout.no_fnmatch_line("*pytest_fusion/*.py*")


@pytest.mark.parametrize(
    ("example", "line"),
    [
        ("rows=4, hiden=4", "E   *SpecError: test_it: @example(hiden=...) names no dim, drawn input or tensor*"),
        ("batch='4'", "E   *SpecError: test_it: @example(batch='4'); expected a tuple of whole numbers of 0 or more*"),
    ],
)
@pytest.mark.parametrize("above", [True, False])
def test_a_wrong_example_is_refused(example: str, line: str, above: bool, project: Project) -> None:
    """Wherever `@example` stands, its names and sizes are known before the first case."""
    ours = "@fused_equivalent(relu_reference, inputs={'x': tensor('*batch rows')})"
    lines = [f"@example({example})", ours]
    project.write("\n".join([*(lines if above else lines[::-1]), BODY]))

    result = project.run()

    assert result.ret == pytest.ExitCode.INTERRUPTED
    result.stdout.fnmatch_lines([line])
    result.stdout.no_fnmatch_line("*pytest_fusion/*.py*")


def test_a_reference_with_defaults_of_its_own_is_fine(project: Project) -> None:
    """Arguments of the reference that have defaults need not be inputs."""
    project.write("""
@few
@fused_equivalent(lambda x, slope=0.0, *, inplace=False: torch.clamp_min(x, slope), inputs=X)
def test_it(x):
    return relu(x)
""")

    project.run().assert_outcomes(passed=1)


def test_errors_of_the_spec_in_the_call_print_one_sentence(project: Project) -> None:
    """A random reference is the user's to mend: the test fails with the sentence, not with frames of ours."""
    project.write("""
@few
@fused_equivalent(lambda x: x + torch.rand_like(x), inputs=X)
def test_it(x):
    return x
""")

    result = project.run()

    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*the reference consumes random numbers*pass the noise*"])
    result.stdout.fnmatch_lines(["ERROR test_it.py::test_it: *reference consumes*", "1 test: 1 ended in an error;*"])
    result.stdout.no_fnmatch_line("*decorator.py*")
    assert project.verdicts == {"test_it": "unknown"}


def test_inputs_that_can_never_be_made_are_the_specs_fault(project: Project) -> None:
    """Sizes below 0 and a strategy without values fail with one sentence each, and say nothing of the kernel."""
    project.write("""
@few
@fused_equivalent(relu_reference, inputs={"x": tensor("rows-9 hidden")}, dims={"rows": dim(0, 4)})
def test_sizes(x):
    return relu(x)

@few
@fused_equivalent(lambda x, k: torch.relu(x), inputs={**X, "k": st.integers().filter(lambda k: False)})
def test_strategy(x, k):
    return relu(x)
""")

    result = project.run()

    result.assert_outcomes(failed=2)
    result.stdout.fnmatch_lines(
        [
            "test_sizes: no case could be made, so the kernel was never called (*gives the negative size*dims=*",
            "test_strategy: no value could be drawn for input 'k': Unsatisfiable: *",
        ]
    )
    result.stdout.no_fnmatch_line("*rejects=*")
    result.stdout.no_fnmatch_line("*decorator.py*")
    result.stdout.no_fnmatch_line("*likely cause*")


def test_a_name_of_an_output_of_another_parametrization_is_fine(project: Project) -> None:
    """One spec serves all parameters: where the reference is told of them, a name that no output of this one
    has is only noted; where it is not, the name is wrong in all."""
    project.write("""
@few
@pytest.mark.parametrize("both", [True, False])
@fused_equivalent(lambda x, both: {"y": x, "z": x} if both else {"y": x}, inputs=X, deterministic={"z": False})
def test_told(x, both):
    return {"y": x.clone(), "z": x.clone()} if both else {"y": x.clone()}


@few
@pytest.mark.parametrize("block", [16])
@fused_equivalent(lambda x: x * 2, inputs=X, deterministic={"outt": False})
def test_untold(x, block):
    return x * 2
""")

    result = project.run()

    result.assert_outcomes(passed=2, failed=1)
    result.stdout.fnmatch_lines(["*'outt': ...} names neither an output nor a gradient; did you mean 'out'[?]*"])
    noted = ["'z'" in str(project.tests[f"test_told[{both}]"]["notes"]) for both in (True, False)]
    assert noted == [False, True]
