"""Reading and comparing baselines is cheap."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def test_a_controller_compares_and_writes_without_torch() -> None:
    """Records, files, comparison and updates import neither torch, triton, numpy nor Hypothesis."""
    names = ("row_compare", "update", "store", "latency_judge")
    heavy = ("torch", "triton", "numpy", "hypothesis")
    code = f"import sys; {'; '.join(f'import pytest_fusion.bench.baseline.{name}' for name in names)}; "
    code += f"print([name for name in {heavy!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)

    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr
