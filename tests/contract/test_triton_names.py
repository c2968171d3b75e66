"""Every private name of Triton that the CPU lane replaces is there, with the parameters known.

Runs against the installed Triton, and against each folder named in ``FUSION_TRITON_SITES`` (separated by ``:``), each
holding another release (``pip install --no-deps --target FOLDER triton==3.9.0``); ``run_matrix.sh`` makes them.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

ROOT = Path(__file__).parents[2]
SITES = [site for site in os.environ.get("FUSION_TRITON_SITES", "").split(os.pathsep) if site]

CHECK = """
import os
os.environ["TRITON_INTERPRET"] = "1"
import triton, triton.runtime.autotuner, triton.runtime.interpreter
from pytest_fusion.interpreter.bridge.contract import check, violations
modules = triton.runtime.interpreter, triton.runtime.autotuner
print(triton.__version__, "|", "; ".join(violations(*modules)), "|", check(triton.__version__, *modules))
"""


def names_of(site: str) -> list[str]:
    """Version, violations and remark of the Triton found first in ``site`` (empty: the installed one)."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in (site, str(ROOT)) if p)}
    done = subprocess.run(
        [sys.executable, "-c", CHECK], capture_output=True, text=True, env=environment, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return [part.strip() for part in done.stdout.split("|")]


@pytest.mark.parametrize("site", ["", *SITES], ids=lambda site: Path(site).name or "installed")
def test_every_private_name_is_known(site: str) -> None:
    """No name is missing or changed, and the release is one of those tested."""
    version, broken, remark = names_of(site)
    assert broken == "", f"Triton {version}: {broken}"
    assert remark == "None", remark


def test_a_changed_parameter_is_a_violation() -> None:
    """The check compares parameters, not only names: a renamed one is reported with both lists."""
    from types import SimpleNamespace

    from pytest_fusion.interpreter.bridge import contract

    module = SimpleNamespace(__name__="triton.runtime.interpreter", _implicit_cvt=lambda value: value)
    (found,) = contract._violation(module, "_implicit_cvt", (("arg",),))
    assert found == "triton.runtime.interpreter._implicit_cvt takes (value), known is (arg)"
    assert contract._violation(module, "_implicit_cvt", (("value",), ("arg",))) == []
    (missing,) = contract._violation(module, "gone.deeper", None)
    assert missing == "triton.runtime.interpreter.gone.deeper is missing"
