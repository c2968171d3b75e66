"""All folders of kernels have one shape: the same files, the same sections of a README, a line in the map."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

KERNELS = Path(__file__).parents[2] / "reference_kernels"
FOLDERS = sorted(path.parent for path in KERNELS.glob("*/__init__.py"))
FILES = ("README.md", "reference.py", "kernel.py", "spec.py")
SECTIONS = ["Contract", "Cost", "Edge cases", "Implementation", "Sources"]
COST = ("Bytes", "FLOPs", "Launches")


def _names(path: Path) -> set[str]:
    """Names that a module's own statements bind, imports included."""
    found: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.ImportFrom):
            found |= {each.asname or each.name for each in node.names}
        elif isinstance(node, ast.Assign):
            found |= {each.id for each in node.targets if isinstance(each, ast.Name)}
    return found


def flaws(folder: Path, overview: str) -> list[str]:
    """What is missing in ``folder``, or in the map of all of them."""
    name = folder.name
    missing = [f"no {file}" for file in (*FILES, f"test_{name}.py") if not (folder / file).is_file()]
    if missing:
        return missing
    found = [] if f"[`{name}`]({name}/README.md)" in overview else ["no line in reference_kernels/README.md"]
    card = (folder / "README.md").read_text()
    if re.findall(r"^# (.*)$", card, re.MULTILINE) != [name]:
        found.append("the README's title is not the folder's name")
    if re.findall(r"^## (.*)$", card, re.MULTILINE) != SECTIONS:
        found.append(f"the README's sections are not {', '.join(SECTIONS)}")
    cost = card.partition("\n## Cost\n")[2].partition("\n## ")[0].lower()
    found += [f"the README's Cost lacks {each}" for each in COST if each.lower() not in cost]
    kernel = (folder / "kernel.py").read_text()
    wanted = {
        "a Triton kernel": r"^@\w*jit\b|^@partial\(jit",
        "a custom op": r"^@torch\.library\.custom_op",
        "a fake": r"\.register_fake$",
    }
    found += [f"kernel.py lacks {each}" for each, mark in wanted.items() if not re.search(mark, kernel, re.MULTILINE)]
    sources = "".join(path.read_text() for path in folder.glob("*.py"))
    if "**Gradients.** None" not in card and ".register_autograd" not in sources:
        found.append('no gradient is registered, and the README does not have "**Gradients.** None"')
    found += [f"spec.py has no {each}" for each in ("SPEC", "SPECS") if each not in _names(folder / "spec.py")]
    public = _names(folder / "__init__.py")
    if not public & (_names(folder / "kernel.py")):
        found.append("no public function is defined in kernel.py")
    if not public & _names(folder / "reference.py"):
        found.append("the reference is not public")
    return found


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_a_folder_has_the_common_shape(folder: Path) -> None:
    """Files, README sections, registration and specs are where they are in every other folder."""
    assert flaws(folder, (KERNELS / "README.md").read_text()) == []


def test_a_folder_of_another_shape_is_found(tmp_path: Path) -> None:
    """A missing file, a missing section and a missing spec are each named."""
    folder = tmp_path / "relu"
    folder.mkdir()
    assert "no kernel.py" in flaws(folder, "")
    for file in (*FILES, "test_relu.py", "__init__.py"):
        (folder / file).write_text("# relu\n\n## Contract\n")
    found = flaws(folder, "[`relu`](relu/README.md)")
    assert "the README's sections are not Contract, Cost, Edge cases, Implementation, Sources" in found
    assert "spec.py has no SPEC" in found
    assert "no line in reference_kernels/README.md" not in found


def test_the_map_names_files_that_exist() -> None:
    """The file to read first, and all shared modules, exist; no folder and no shared module is left out."""
    overview = (KERNELS / "README.md").read_text()
    rows = re.findall(r"^\| \[`(\w+)`\].* \| `([\w/]+\.py)` \|$", overview, re.MULTILINE)
    assert sorted(name for name, _ in rows) == [folder.name for folder in FOLDERS]
    assert [file for _, file in rows if not (KERNELS / file).is_file()] == []
    shared = {path.name for path in KERNELS.glob("_*.py")} - {"__init__.py"}
    assert shared == set(re.findall(r"`(_\w+\.py)`", overview))
