"""ncu's output, as it printed it on an H200, becomes launches with bytes; what cannot be read is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_fusion.run.measure.tools import again, ncu
from pytest_fusion.run.measure.tools.ncu import METRICS, Profiled, UnreadableError, parse

# A bfloat16 softmax of 8192 x 4096 called twice, behind what draws its input.
REAL = (Path(__file__).parent / "ncu" / "softmax_h200.csv").read_text(encoding="utf-8")
HEAD = '"ID","Process ID","Kernel Name","Section Name","Metric Name","Metric Unit","Metric Value"'


def table(*rows: tuple[str, str, str]) -> str:
    """Metric, unit and value of one launch."""
    return "\n".join([HEAD, *(f'"0","1","k(int *)","","{name}","{unit}","{value}"' for name, unit, value in rows)])


def test_what_an_h200_printed_is_read() -> None:
    """Each launch in order, bytes to the last digit, per cent as shares, nanoseconds as seconds."""
    drawn, first, second = parse(REAL)
    assert "distribution_elementwise" in drawn.kernel
    assert first.kernel.startswith("void unnamed>::cunn_SoftMaxForwardReg<BFloat16")
    assert (first.dram_read_bytes, first.dram_written_bytes) == (67_121_664, 46_455_296)
    assert (second.dram_read_bytes, second.dram_written_bytes) == (67_121_152, 46_485_760)
    assert first.duration_s == pytest.approx(107.424e-6)
    assert first.occupancy == pytest.approx(0.9395)
    assert first.tensor_instructions == 1_310_720
    assert first.tensor_share is None


def test_launches_are_ordered_by_their_numbers() -> None:
    """As numbers, however the rows stand."""
    rows = [f'"{n}","1","k{n}","","dram__bytes_read.sum","byte","{n}"' for n in (10, 2, 9)]
    assert [one.kernel for one in parse("\n".join([HEAD, *rows]))] == ["k2", "k9", "k10"]


@pytest.mark.parametrize("text", ["n/a", "N/A", "nan", "", "(!) n/a", "(!) nan"])
def test_a_metric_that_the_gpu_lacks_leaves_the_others(text: str) -> None:
    """It has no value, whatever its unit; the others have."""
    found = parse(table(("sm__inst_executed_pipe_tensor.sum", "", text), ("dram__bytes_read.sum", "byte", "1,024")))
    assert found == [Profiled("k(int *)", dram_read_bytes=1024)]


@pytest.mark.parametrize(
    ("name", "unit", "value", "field", "expected"),
    [
        ("dram__bytes_read.sum", "Mbyte", "67.12", "dram_read_bytes", 67_120_000),
        ("dram__bytes_write.sum", "byte", "0", "dram_written_bytes", 0),
        ("gpu__time_duration.sum", "us", "107.42", "duration_s", 107.42e-6),
        ("gpu__time_duration.sum", "msecond", "1.5", "duration_s", 1.5e-3),
        ("sm__inst_executed_pipe_tensor.sum", "inst", "1.31e+06", "tensor_instructions", 1_310_000),
        ("sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active", "%", "87.5", "tensor_share", 0.875),
    ],
)
def test_units_of_other_versions(name: str, unit: str, value: str, field: str, expected: float) -> None:
    """Scaled ones, and the words of older versions."""
    (found,) = parse(table((name, unit, value)))
    assert getattr(found, field) == pytest.approx(expected)


@pytest.mark.parametrize(
    "output",
    [
        table(("dram__bytes_read.sum", "byte", "many")),
        table(("dram__bytes_read.sum", "furlong", "1")),
        table(("dram__bytes_read.sum", "byte", "67.121.664")),
        table(("dram__bytes_read.sum", "byte", "67.121")),
        table(("dram__bytes_read.sum", "byte", "-1")),
        f'{HEAD}\n"0","1","k"',
        f'{HEAD}\n"0","1","k","","dram__bytes_read.sum","byte","1","more"',
        f'{HEAD}\n"first","1","k","","dram__bytes_read.sum","byte","1"',
        f"{HEAD}\nSegmentation fault",
        REAL[:-200],
    ],
)
def test_what_cannot_be_read_is_refused(output: str) -> None:
    """A line cut short, an unknown unit, another way of writing numbers: no number is guessed."""
    with pytest.raises(UnreadableError):
        parse(output)


@pytest.mark.parametrize("output", ["", "==WARNING== No kernels were profiled.\n", f"{HEAD}\n==PROF== done\n"])
def test_no_table_is_no_launch(output: str) -> None:
    """What ncu prints before and behind a table is none of its rows."""
    assert parse(output) == []


def test_the_reason_is_told() -> None:
    """Missing permission with what helps; any other error in ncu's words; a failing program says itself why."""
    denied = "==ERROR== ERR_NVGPUCTRPERM - The user does not have permission to access NVIDIA GPU Performance Counters"
    assert "CAP_SYS_ADMIN" in ncu.problem(denied)
    assert (
        ncu.problem("==PROF== x\n==ERROR== The driver is too old\n==ERROR== more") == "ncu says: The driver is too old"
    )
    assert ncu.problem("==ERROR== The application returned an error code (1).") == ""
    assert ncu.problem(REAL) == ""


def test_metrics_that_ncu_complains_about() -> None:
    """Those that a warning or an error names, and no other line does."""
    names = list(METRICS)
    said = "==ERROR== Failed to find metric dram__bytes_read.sum\n==PROF== dram__bytes_write.sum\n"
    assert ncu.lacking(said, names) == ["dram__bytes_read.sum"]
    assert ncu.lacking(REAL, names) == []


def test_the_call(tmp_path: Path) -> None:
    """Clocks stay as they are, only what the program marks is profiled, and the table has a file of its own."""
    found = ncu.command("/opt/ncu", tmp_path / "log", ["a", "b"], ["python", "x.py"])
    assert found[0] == "/opt/ncu"
    assert found[-2:] == ["python", "x.py"]
    pairs = dict(zip(found[2:-2:2], found[3:-2:2], strict=True))
    assert pairs["--clock-control"] == "none"
    assert pairs["--profile-from-start"] == "off"
    assert pairs["--target-processes"] == "all"
    assert pairs["--metrics"] == "a,b"
    assert pairs["--log-file"] == str(tmp_path / "log")


def test_where_ncu_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On PATH first, then in the toolkit that the environment names, then the newest of its own packages."""

    def install(path: Path) -> str:
        path.parent.mkdir(parents=True)
        path.write_text("#!/bin/sh\n")
        path.chmod(0o755)
        return str(path)

    monkeypatch.setattr(ncu, "_PACKAGES", str(tmp_path / "packages"))
    monkeypatch.setattr(again, "_TOOLKITS", ())
    toolkit = install(tmp_path / "cuda" / "bin" / "ncu")
    on_path = install(tmp_path / "bin" / "ncu")
    assert ncu.find({"PATH": str(tmp_path / "bin"), "CUDA_HOME": str(tmp_path / "cuda")}) == on_path
    assert ncu.find({"PATH": str(tmp_path / "none"), "CUDA_HOME": str(tmp_path / "cuda")}) == toolkit
    assert ncu.find({"PATH": ""}) is None
    install(tmp_path / "packages" / "2024.1.0" / "ncu")
    newer = install(tmp_path / "packages" / "2025.2.0" / "ncu")
    assert ncu.find({"PATH": ""}) == newer
