"""compute-sanitizer's output, in the forms that its documentation shows, becomes reports with kernels and lines."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pytest_fusion.run.measure.tools import sanitizer
from pytest_fusion.run.measure.tools.sanitizer import MARK, Report, parse

MEMCHECK = f"""
============================= test session starts ==============================
========= COMPUTE-SANITIZER
{MARK} 0
{MARK} 1
========= Invalid __global__ read of size 4 bytes
=========     at add_kernel+0x1b0 in /home/me/project/kernels.py:15
=========     by thread (96,0,0) in block (3,0,0)
=========     Access at 0x7f2d2ce00200 is out of bounds
=========     and is 1 bytes after the nearest allocation at 0x7f2d2ce00000 of size 512 bytes
=========     Saved host backtrace up to driver entry point at kernel launch time
=========         Host Frame: cuLaunchKernelEx [0x2d0f1a] in libcuda.so.1
=========         Host Frame: launch(PyObject*) at /tmp/cuda_utils.c:90 [0x3f2] in cuda_utils.so
=========
========= Invalid __global__ read of size 4 bytes
=========     at add_kernel+0x1b0 in /home/me/project/kernels.py:15
=========     by thread (97,0,0) in block (3,0,0)
=========     Access at 0x7f2d2ce00204 is out of bounds
=========     and is 5 bytes after the nearest allocation at 0x7f2d2ce00000 of size 512 bytes
=========
========= Program hit cudaErrorLaunchFailure (error 719) due to "unspecified launch failure" on CUDA API call to cudaX.
=========     Saved host backtrace up to driver entry point at error
=========         Host Frame: c10::cuda::device_synchronize() at ??:0 [0x5c1] in libc10_cuda.so
=========
========= ERROR SUMMARY: 3 errors
1 passed in 31.21s
"""

OLD = """
========= COMPUTE-SANITIZER
========= Invalid __global__ write of size 4 bytes
=========     at 0x160 in /src/memcheck_demo.cu:6:unaligned_kernel(void)
=========     by thread (0,0,0) in block (0,0,0)
=========     Address 0x7f6510c00001 is misaligned
=========
========= Invalid __global__ write of size 4 bytes
=========     at 0x60 in out_of_bounds_kernel(float*, int)
=========     by thread (0,0,0) in block (0,0,0)
=========     Address 0x87654320 is out of bounds
=========
========= ERROR SUMMARY: 2 errors
"""

INITCHECK = """
========= COMPUTE-SANITIZER
========= Uninitialized __global__ memory read of size 4 bytes
=========     at void at::native::vectorized_elementwise_kernel<4, FillFunctor<float>>(int, float)+0x90
=========     by thread (64,0,0) in block (0,0,0)
=========     Access at 0x7f36d7200100
=========
========= Uninitialized __global__ memory read of size 16 bytes
=========     at reduce_partials+0x90 in kernels.py:44
=========     by thread (65,0,0) in block (2,1,0)
=========     Access at 0x7f36d7200104
=========
========= Host API uninitialized memory access at 0x7f36d7200000 of size 400 bytes
=========     Saved host backtrace up to driver entry point at error
=========         Host Frame: cuMemcpyDtoHAsync_v2 [0x2d0f1a] in libcuda.so.1
=========
========= ERROR SUMMARY: 3 errors
"""

RACECHECK = """
========= COMPUTE-SANITIZER
========= Error: Race reported between Write access at sum_kernel(int *, int *)+0x50 in racecheck_demo.cu:16
=========     and Read access at sum_kernel(int *, int *)+0x100 in racecheck_demo.cu:20 [508 hazards]
=========
========= Warning: Race reported between Read access at scan+0x258 in kernels.py:39
=========     and Write access at scan+0x2f0 in kernels.py:41 [31 hazards]
=========
========= RACECHECK SUMMARY: 2 hazards displayed (1 error, 1 warning)
"""

SYNCCHECK = """
========= COMPUTE-SANITIZER
========= Barrier error detected. Divergent thread(s) in warp.
=========     at my_kernel(int *)+0x50 in /src/synccheck_demo.cu:27
=========     by thread (32,0,0) in block (1,0,0)
=========     Saved host backtrace up to driver entry point at kernel launch time
=========
========= ERROR SUMMARY: 1 error
"""


def test_memcheck() -> None:
    """Kernel, file, line, program, distance and case of an access; the same place counts once, API errors never."""
    (found,) = parse("memcheck", MEMCHECK)
    assert found == Report(
        "memcheck",
        "Invalid __global__ read of size 4 bytes",
        "add_kernel",
        "/home/me/project/kernels.py",
        15,
        "96,0,0",
        "3,0,0",
        (
            "Access at 0x7f2d2ce00200 is out of bounds",
            "and is 1 bytes after the nearest allocation at 0x7f2d2ce00000 of size 512 bytes",
        ),
        case=1,
    )
    assert found.where == "add_kernel at kernels.py:15"
    assert str(found).startswith(
        "memcheck: Invalid __global__ read of size 4 bytes in add_kernel at kernels.py:15, pro"
    )


def test_the_form_of_older_versions() -> None:
    """Where the line comes before the kernel, and where there is no line at all."""
    first, second = parse("memcheck", OLD)
    assert (first.kernel, first.file, first.line) == ("unaligned_kernel", "/src/memcheck_demo.cu", 6)
    assert (second.kernel, second.file, second.line) == ("out_of_bounds_kernel", "", 0)
    assert second.details == ("Address 0x87654320 is out of bounds",)


def test_initcheck() -> None:
    """torch's own kernels are told from the candidate's, and copies to the host are no kernels."""
    torchs, own = parse("initcheck", INITCHECK)
    assert not torchs.own
    assert own.own
    assert (own.kernel, own.line, own.block) == ("reduce_partials", 44, "2,1,0")


def test_racecheck() -> None:
    """Both sides of a race, and whether the tool calls it an error."""
    first, second = parse("racecheck", RACECHECK)
    assert (first.kernel, first.line, first.mild) == ("sum_kernel", 16, False)
    assert first.details == ("and Read access at sum_kernel(int *, int *)+0x100 in racecheck_demo.cu:20 [508 hazards]",)
    assert (second.kernel, second.line, second.mild) == ("scan", 39, True)


def test_synccheck() -> None:
    """A barrier that not all threads reach."""
    (found,) = parse("synccheck", SYNCCHECK)
    assert (found.what, found.line) == ("Barrier error detected. Divergent thread(s) in warp.", 27)


@pytest.mark.parametrize(
    "text", ["", "no prefix at all+0x1 in a.py:3", "=========", "========= COMPUTE-SANITIZER\n" * 3]
)
def test_other_output_holds_no_report(text: str) -> None:
    """Nothing is made of what is no report."""
    assert parse("memcheck", text) == []


def test_a_report_cut_off_is_still_one() -> None:
    """Output that ends in the middle of a report keeps what is known of it."""
    cut = MEMCHECK.partition("=========     by thread")[0]
    (found,) = parse("memcheck", cut)
    assert (found.line, found.thread) == (15, "")


@pytest.mark.parametrize(
    ("kernel", "own"),
    [
        ("softmax_kernel", True),
        ("_attn_fwd", True),
        ("triton_poi_fused_add_0", True),
        ("void at::native::reduce_kernel<512, 1>", False),
        ("void cub::DeviceScanKernel<...>", False),
        ("sm90_xmma_gemm_f32f32", False),
        ("void cutlass::Kernel2<...>", False),
    ],
)
def test_whose_kernel_it_is(kernel: str, own: bool) -> None:
    """Names with the namespaces of torch and of libraries are theirs."""
    assert Report("initcheck", "x", kernel).own is own


def test_where_it_is_looked_for(tmp_path: Path) -> None:
    """On PATH, then in the toolkit that CUDA_HOME names; otherwise nowhere that a test could know."""
    tool = tmp_path / "cuda" / "bin" / "compute-sanitizer"
    tool.parent.mkdir(parents=True)
    tool.write_text("#!/bin/sh\n")
    tool.chmod(0o755)
    assert sanitizer.find({"PATH": str(tool.parent)}) == str(tool)
    assert sanitizer.find({"PATH": os.devnull, "CUDA_HOME": str(tmp_path / "cuda")}) == str(tool)
