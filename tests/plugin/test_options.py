"""Options and their ini twins: what they accept, what wins, and what a wrong one says."""

from __future__ import annotations

import pytest

from pytest_fusion.errors import FusionError
from pytest_fusion.run import device_choice
from tests.plugin.conftest import Project

ONE = """
@few
@fused_equivalent(relu_reference, inputs=X)
def test_it(x):
    return relu(x)
"""


@pytest.mark.parametrize(
    ("option", "line"),
    [
        ("--fusion-device=gpu", "*--fusion-device 'gpu': expected auto, cpu, cuda or cuda:N*"),
        ("--fusion-device=cuda:x", "*--fusion-device 'cuda:x': expected auto, cpu, cuda or cuda:N*"),
        ("--fusion-device=cpu:0", "*--fusion-device 'cpu:0': expected auto, cpu, cuda or cuda:N*"),
        ("--fusion-device=cuda:99", "*--fusion-device cuda:99: this machine shows * CUDA device(s); use*cpu*"),
        ("--fusion-profile=quick", "*--fusion-profile: invalid choice: 'quick'*dev*ci*deep*"),
        ("--fusion-seconds=0", "*--fusion-seconds '0': give a number of seconds, none, or profile"),
        ("--fusion-seconds=soon", "*--fusion-seconds 'soon': give a number of seconds, none, or profile"),
        ("--fusion-isolate=yes", "*--fusion-isolate: invalid choice: 'yes'*auto*on*off*"),
        ("--fusion-json=.", "*--fusion-json .: that is a folder*"),
        ("--fusion-report=test_it.py/report.html", "*--fusion-report test_it.py/report.html: cannot write in *"),
        ("--fusion-json=", "*--fusion-json was given an empty path*"),
        ("--fusion-replay=absent.json", "*cannot read the replay file *absent.json: No such file or directory"),
    ],
)
def test_a_wrong_value_stops_the_run_before_it_starts(option: str, line: str, project: Project) -> None:
    """Each is an error of use (exit 4) in one sentence, and no test runs."""
    project.write(ONE)

    result = project.run(option)

    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([line])
    result.stderr.no_fnmatch_line("*Traceback*")
    result.stdout.no_fnmatch_line("*test_it.py .*")


@pytest.mark.parametrize(
    ("ini", "line"),
    [
        ("fusion_device = tpu", "*--fusion-device 'tpu': expected auto, cpu, cuda or cuda:N*"),
        ("fusion_profile = deeep", "*unknown profile 'deeep'; did you mean 'deep'?"),
        ("fusion_isolate = of", "*fusion_isolate='of'; did you mean 'off'?"),
        ("fusion_report = .", "*--fusion-report .: that is a folder*"),
    ],
)
def test_a_wrong_ini_value_stops_the_run_too(ini: str, line: str, project: Project) -> None:
    """An ini twin is checked as its option is."""
    project.write(ONE)
    project.pytester.makeini(f"[pytest]\n{ini}\n")

    result = project.pytester.runpytest_inprocess("-p", "no:cacheprovider")

    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([line])


def test_a_budget_is_that_of_the_profile_unless_one_is_given(project: Project) -> None:
    """`dev` has one, `ci` counts cases; an option wins over the ini file, which wins over the profile."""
    project.write(ONE)
    options = ("-p", "no:cacheprovider", "--fusion-device=cpu", "--collect-only")
    for ini, given, chosen in (
        ("", (), "profile dev, 6 s of CPU time for each test"),
        ("", ("--fusion-profile=ci",), "profile ci"),
        ("fusion_seconds = 2.5", ("--fusion-profile=ci",), "profile ci, 2.5 s of CPU time for each test"),
        ("fusion_seconds = 2.5", ("--fusion-seconds=none",), "profile dev"),
    ):
        project.pytester.makeini(f"[pytest]\n{ini}\n")
        result = project.pytester.runpytest_inprocess(*options, *given)
        result.stdout.fnmatch_lines([f"fusion: *, {chosen}"])


def test_a_run_that_measures_may_have_a_profile_of_its_own(project: Project) -> None:
    """`fusion_bench_profile` holds with --fusion-bench alone, and a profile on the command line wins over it."""
    project.write(ONE)
    project.pytester.makeini("[pytest]\nfusion_device = cpu\nfusion_profile = ci\nfusion_bench_profile = gate\n")
    options = ("-p", "no:cacheprovider")
    for given, chosen in (
        ((), "ci"),
        (("--fusion-bench",), "gate"),
        (("--fusion-bench", "--fusion-profile=dev"), "dev"),
        (("--fusion-bench", "--fusion-bench-profile=ci"), "ci"),
    ):
        result = project.pytester.runpytest_inprocess(*options, *given)
        result.stdout.fnmatch_lines([f"fusion: *, profile {chosen}*"])
        assert result.ret == pytest.ExitCode.OK


def test_ini_twins_and_what_wins(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every ini twin has its effect, paths are as seen from the ini file, and the command line wins."""
    project.write(ONE)
    project.pytester.makeini(
        "[pytest]\nfusion_device = cpu\nfusion_profile = ci\nfusion_isolate = off\n"
        "fusion_json = out/ini.json\nfusion_report = out/ini.html\n"
    )
    options = ("-p", "no:cacheprovider")

    first = project.pytester.runpytest_inprocess(*options)
    second = project.pytester.runpytest_inprocess(*options, "--fusion-profile=dev", "--fusion-json=mine.json")

    first.stdout.fnmatch_lines(["fusion: cpu (Triton interpreter), *, profile ci", "html report: out/ini.html"])
    second.stdout.fnmatch_lines(["fusion: *, profile dev, *", "json report: mine.json"])
    assert (project.pytester.path / "out/ini.html").is_file()
    (project.pytester.path / "out/ini.html").unlink()
    (project.pytester.path / "below").mkdir()
    monkeypatch.chdir(project.pytester.path / "below")
    third = project.pytester.runpytest_inprocess(*options, "--fusion-json=mine.json", "../test_it.py")
    third.stdout.fnmatch_lines(["html report: ../out/ini.html", "json report: mine.json"])
    assert (project.pytester.path / "out/ini.html").is_file()
    assert (project.pytester.path / "below/mine.json").is_file()
    assert "not isolated: --fusion-isolate off" in (project.pytester.path / "mine.json").read_text()


def test_isolation(project: Project) -> None:
    """`on` and `auto` run the kernel in another process, `off`, --pdb and --trace in this one."""
    project.write("""
import os
HERE = os.getpid()

@settings(max_examples=1)
@fused_equivalent(relu_reference, inputs=X)
def test_it(x):
    print("other process:", os.getpid() != HERE)
    return relu(x)
""")

    for options, apart in (
        (("--fusion-isolate=on",), True),
        (("--fusion-isolate=auto",), True),
        (("--fusion-isolate=off",), False),
        (("--pdb",), False),
    ):
        result = project.run("-s", *options)
        result.stdout.fnmatch_lines([f"*other process: {apart}"])
        assert project.tests["test_it"]["checks"]["crash"]["verdict"] == ("pass" if apart else "unknown")


def test_a_device_that_hides(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA_VISIBLE_DEVICES decides how many devices there are, up to the first entry that hides the rest."""

    class Driver:
        def nvmlDeviceGetCount_v2(self, count: object) -> int:  # noqa: N802 - the driver's name
            count._obj.value = 4  # type: ignore[attr-defined]
            return 0

    monkeypatch.setattr(device_choice, "_nvml", Driver)
    found = {}
    for visible in (None, "", "-1", "0", "0,1", "1,-1,2", "GPU-1,GPU-2", "0,1,2,3,4"):
        if visible is None:
            monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        else:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        found[visible] = device_choice.cuda_devices.__wrapped__()

    assert found == {None: 4, "": 0, "-1": 0, "0": 1, "0,1": 2, "1,-1,2": 1, "GPU-1,GPU-2": 2, "0,1,2,3,4": 4}
    monkeypatch.setattr(device_choice, "cuda_devices", lambda: 2)
    assert (device_choice.choose("auto"), device_choice.choose("cuda"), device_choice.choose("cuda:1")) == (
        "cuda:0",
        "cuda:0",
        "cuda:1",
    )
    with pytest.raises(FusionError, match="shows 2 CUDA device"):
        device_choice.choose("cuda:2")
