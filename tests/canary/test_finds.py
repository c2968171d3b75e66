"""What a disagreement in production leaves behind, and that it becomes a test."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pytest_fusion import FusionSpec, canary, tensor
from pytest_fusion.canary import Canary, Policy
from pytest_fusion.canary.live import disagreements
from pytest_fusion.canary.recording import recordings
from pytest_fusion.canary.recording.recorder import record
from pytest_fusion.case.make import make_inputs
from pytest_fusion.diagnosis.repro import replay_file
from pytest_fusion.errors import CanaryError
from tests.canary.kernels import Patient
from tests.forked import run_command, run_pytest
from tests.sweeps import sweep

CPU = torch.device("cpu")


def old(x: Tensor, scale: float = 2.0) -> Tensor:
    return x * scale


def wide_is_wrong(x: Tensor, scale: float = 2.0) -> Tensor:
    return x * scale + (x.shape[-1] > 8)


def raises(x: Tensor, scale: float = 2.0) -> Tensor:
    raise ValueError("no")


SPEC = FusionSpec(fused=old, reference=old, inputs={"x": tensor("*batch n"), "scale": 2.0}, name="doubling")


def made(folder: Path, candidate: Any, spec: FusionSpec | None = SPEC, **policy: Any) -> Canary:
    given = {"interval_s": 3600.0, "shadow": 1.0, "verify": 1.0, **policy}
    return canary(
        "k", incumbent=old, candidate=candidate, judge=Patient(), policy=Policy(directory=folder, **given), spec=spec
    )


def files(folder: Path) -> list[Path]:
    return sorted((folder / "finds").glob("*.json"))


@pytest.mark.parametrize("state", ["shadow", "full"])
def test_a_disagreement_is_a_case_of_the_spec(tmp_path: Path, state: str) -> None:
    """What the kernels disagree on becomes a private replay file of its sizes, layout and range; no other does."""
    kernel = made(tmp_path, wide_is_wrong, state=state)
    for _ in range(3):
        kernel(torch.randn(3, 8))
        kernel(torch.randn(5, 40)[:, ::2].mul_(100))
    kernel.refresh()

    found = [replay_file.read(path) for path in files(tmp_path)]
    assert len(found) == 3 == kernel.status()["finds"]
    assert {(one.nodeid, one.spec, one.check) for one in found} == {("doubling", "doubling", "values")}
    assert found[0].case.sizes == {"batch": (5,), "n": 20}
    assert found[0].case.tensors["x"].layout.kind == "strides(40,2)"
    x = make_inputs(SPEC, found[0].case, CPU)["x"]
    assert 100 < float(x.abs().max()) < 1000
    assert all(path.stat().st_mode & 0o077 == 0 for path in files(tmp_path))
    assert recording_files(tmp_path) == []


def recording_files(folder: Path) -> list[Path]:
    return list((folder / "finds").glob("*.recording.jsonl"))


def test_kernels_that_agree_leave_nothing(tmp_path: Path) -> None:
    """No file is made for calls on which both say the same."""
    kernel = made(tmp_path, lambda x, scale=2.0: x + x)
    for _ in range(5):
        kernel(torch.randn(3, 8))
    kernel.refresh()

    assert not (tmp_path / "finds").exists()


@pytest.mark.parametrize(
    ("candidate", "check"),
    [
        (raises, "error"),
        (lambda x, scale=2.0: (x * scale)[:1], "structure"),
        (lambda x, scale=2.0: x.mul_(scale), "inputs"),
        (lambda x, scale=2.0: x * scale / 0, "values"),
    ],
    ids=["raises", "structure", "inputs", "nonfinite"],
)
def test_each_fault_names_the_check_that_would_say_it(tmp_path: Path, candidate: Any, check: str) -> None:
    """Whatever the candidate does wrong in shadow, its inputs are kept as they were before the kernels ran."""
    kernel = made(tmp_path, candidate, writes=())
    x = torch.arange(1.0, 9.0)
    kernel(x)
    kernel.refresh()

    (found,) = [replay_file.read(path) for path in files(tmp_path)]
    made_x = make_inputs(SPEC, found.case, CPU)["x"]
    assert found.check == check
    assert (float(made_x.min()), float(made_x.max())) == (1.0, 8.0)


def test_a_candidate_that_raises_while_it_serves_leaves_its_inputs(tmp_path: Path) -> None:
    """A fallback keeps what the candidate was called with, before the incumbent runs on it."""
    kernel = made(tmp_path, raises, state="full")
    kernel(torch.arange(1.0, 9.0))  # the first call of its shape is the incumbent's, and compared
    kernel(torch.arange(1.0, 9.0) * 7)
    kernel.refresh()

    highest = {float(make_inputs(SPEC, replay_file.read(path).case, CPU)["x"].max()) for path in files(tmp_path)}
    assert highest == {8.0, 56.0}


def test_no_more_than_twenty_of_a_class(tmp_path: Path) -> None:
    """Of each class of shapes twenty inputs are kept, of another class its own twenty."""
    kernel = made(tmp_path, wide_is_wrong)
    for i in range(30):
        kernel(torch.randn(3, 16))
        if i < 5:
            kernel(torch.randn(3, 100))
        kernel.refresh()

    assert len(files(tmp_path)) == disagreements.MOST_PER_BUCKET + 5


def test_without_a_spec_the_call_is_kept(tmp_path: Path) -> None:
    """A find without a spec is a line like those of a recording, and becomes a case of a spec that is given later."""
    kernel = made(tmp_path, wide_is_wrong, spec=None)
    kernel(torch.randn(3, 16))
    kernel.refresh()

    assert files(tmp_path) == []
    found = recordings.cases(tmp_path / "finds", SPEC)
    assert (found.total, len(found), found.found[0].case.sizes) == (1, 1, {"batch": (3,), "n": 16})
    (line,) = recording_files(tmp_path)[0].read_text().splitlines()
    assert json.loads(line)["result"] == "violation"
    assert recording_files(tmp_path)[0].stat().st_mode & 0o077 == 0


def test_what_the_spec_cannot_express_is_kept_with_its_reason(tmp_path: Path) -> None:
    """A call that is no case of the spec is not lost: its line says why."""
    kernel = made(tmp_path, wide_is_wrong)
    kernel(torch.randn(3, 16), 3.0)
    kernel.refresh()

    assert files(tmp_path) == []
    (line,) = recording_files(tmp_path)[0].read_text().splitlines()
    assert json.loads(line)["unmatched"] == "scale=3.0 where the spec always has 2.0"


def test_tensors_are_kept_only_if_asked_for(tmp_path: Path) -> None:
    """With ``keep_tensors`` the very inputs come back as before a kernel wrote them; without it no value does."""
    pytest.importorskip("safetensors")

    def in_place(x: Tensor, scale: float = 2.0) -> Tensor:
        return x.mul_(scale)

    def wrong(x: Tensor, scale: float = 2.0) -> Tensor:
        return x.mul_(scale).add_(1)

    x = torch.randn(3, 16)
    before = x.clone()
    for keep in (True, False):
        folder = tmp_path / str(keep)
        policy = Policy(directory=folder, interval_s=3600.0, shadow=1.0, writes=("x",), keep_tensors=keep)
        kernel = canary("k", incumbent=in_place, candidate=wrong, judge=Patient(), policy=policy, spec=SPEC)
        kernel(x.copy_(before))
        kernel.refresh()
        (path,) = files(folder)
        made_x = make_inputs(SPEC, replay_file.read(path).case, CPU)["x"]
        assert torch.equal(made_x, before) is keep
        assert any((folder / "finds").rglob("*.safetensors")) is keep


def test_a_folder_that_cannot_be_written_costs_no_call(tmp_path: Path) -> None:
    """Finds that cannot be written are left out; calls, comparisons and the log go on."""
    kernel = made(tmp_path, wide_is_wrong)
    (tmp_path / "finds").write_text("in the way")
    x = torch.randn(3, 16)

    assert torch.equal(kernel(x), x * 2)
    kernel.refresh()

    assert kernel.status()["counts"]["compared: violation"] == 1
    assert kernel.status()["finds"] == 0


def test_wrong_keywords_are_told() -> None:
    """A spec that is none, and a policy that cannot be meant, are errors where they are written."""
    with pytest.raises(CanaryError, match="expected a FusionSpec"):
        canary("k", incumbent=old, candidate=old, spec="doubling")  # type: ignore[arg-type]
    with pytest.raises(CanaryError, match="keep_tensors='yes'"):
        Policy(keep_tensors="yes")  # type: ignore[arg-type]


_TEST = """
    import torch
    from pytest_fusion import FusionSpec, tensor

    def right(x, scale):
        return x * scale

    def fused(x, scale):
        return x * scale {wrong}

    SPEC = FusionSpec(fused=fused, reference=right, inputs={{"x": tensor("*batch n"), "scale": 2.0}}, name="doubling")
    test_it = SPEC.test()
    test_other = SPEC.with_(name="another").test()
"""


@sweep("wrong", ["", "+ (x.shape[-1] == 777)"], ids=["mended", "wrong"])
def test_a_find_is_a_test(tmp_path: Path, pytester: pytest.Pytester, wrong: str) -> None:
    """The file replays in the test whose spec has that name, and in no other; pinned, it runs there from then on."""
    kernel = made(tmp_path, wide_is_wrong)
    kernel(torch.randn(3, 777))
    kernel.refresh()
    (path,) = files(tmp_path)
    pytester.makepyfile(_TEST.format(wrong=wrong))
    options = ("--fusion-device", "cpu", "-p", "no:cacheprovider")

    once = run_pytest(pytester, "--fusion-replay", path, *options)

    once.assert_outcomes(failed=bool(wrong), passed=not wrong, deselected=1)
    lost = run_command(pytester, "replay", path)
    assert lost.ret == 2
    lost.stderr.fnmatch_lines(
        ["*belongs to the spec 'doubling' and names no test file; name it: pytest --fusion-replay *"]
    )
    pinned = run_command(pytester, "pin", path)
    pinned.stdout.fnmatch_lines(["pinned: fusion_replays/doubling-*.json"])
    if wrong:
        after = run_pytest(pytester, *options, "-k", "test_it")
        after.stdout.fnmatch_lines(["*pinned replay fusion_replays/doubling-*"])


def test_a_recorder_before_a_canary_is_called_as_the_kernel(tmp_path: Path) -> None:
    """Both stand in for the same function: a recorded incumbent behind a canary is recorded and compared."""
    recorder = record("k", old, tmp_path / "traffic", interval_s=3600)
    kernel = canary(
        "k",
        incumbent=recorder,
        candidate=old,
        judge=Patient(),
        policy=Policy(directory=tmp_path, interval_s=3600.0, shadow=1.0),
    )
    kernel(torch.randn(3, 16))
    kernel.refresh()
    recorder.close()

    assert kernel.status()["counts"] == {"compared: ok": 1}
    assert recordings.cases(tmp_path / "traffic", SPEC, name="k").total == 1
