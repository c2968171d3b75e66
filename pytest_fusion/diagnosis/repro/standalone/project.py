"""The user's test module, imported without pytest_fusion: stand-ins take its place."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import inspect
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any


class Impossible(Exception):
    """The script cannot be run here; the message says why."""


# The device that pytest-fusion's CPU lane describes: launchers choose grids and tiles by it.
GPU = types.SimpleNamespace(
    name="modelled sm_90",
    major=9,
    minor=0,
    multi_processor_count=132,
    total_memory=80 * 2**30,
    max_threads_per_multi_processor=2048,
    regs_per_multiprocessor=65536,
    shared_memory_per_block=49152,
    shared_memory_per_block_optin=232448,
    shared_memory_per_multiprocessor=233472,
    L2_cache_size=50 * 2**20,
    warp_size=32,
    gcnArchName="",
)


def describe_gpu(cuda: Any, multiprocessors: int) -> None:
    """Let ``torch.cuda`` answer what launchers ask before they launch, where it would refuse for want of a GPU."""
    if cuda.device_count() > 0:
        return
    GPU.multi_processor_count = multiprocessors
    cuda.device = contextlib.nullcontext  # ``with torch.cuda.device(x.device.index)`` has None to select
    cuda.get_device_properties = lambda device=None: GPU
    cuda.get_device_capability = lambda device=None: (GPU.major, GPU.minor)
    cuda.get_device_name = lambda device=None: GPU.name
    cuda.current_device = lambda: 0
    cuda.set_device = lambda device: None


class StandIn:
    """Takes the place of whatever a test module uses of pytest_fusion, and of test tools that are not installed.

    Called with one function it is a decorator that changes nothing; anything else gives another stand-in.
    """

    def __init__(self, **fields: Any) -> None:
        vars(self).update(fields)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return (lambda *_, **__: StandIn()) if name == "composite" else StandIn()

    def __call__(self, *given: Any, **named: Any) -> Any:
        function = len(given) == 1 and not named and callable(given[0]) and not isinstance(given[0], StandIn)
        return given[0] if function else StandIn()

    def __getitem__(self, item: Any) -> StandIn:
        return StandIn()

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __or__(self, other: Any) -> StandIn:
        return self

    __ror__ = __or__

    def __mro_entries__(self, bases: Any) -> tuple[()]:
        return ()


class FusionSpec(StandIn):
    """Keeps the two functions of a spec, so that its test can be asked for them."""

    def with_(self, **changes: Any) -> FusionSpec:
        return FusionSpec(**{**vars(self), **changes})

    def test(self) -> Callable[[], None]:
        def test() -> None: ...

        test.__dict__["judged"] = (self.fused, self.reference)
        return test


def fused_equivalent(reference: Any = None, **keywords: Any) -> Callable[[Any], Any]:
    """Leaves the test as it is, with the reference beside it."""

    def decorate(test: Any) -> Any:
        test.judged = (test, keywords.get("reference", reference))
        return test

    return decorate


class StandInModule(types.ModuleType):
    """A module that has whatever is imported from it."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []  # what makes it a package

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        known = {"FusionSpec": FusionSpec, "fused_equivalent": fused_equivalent}
        return known[name] if name in known else StandIn()


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports stand-ins under the names of some packages, and of their submodules."""

    def __init__(self, packages: set[str]) -> None:
        self.packages = packages

    def find_spec(self, name: str, *_: Any) -> importlib.machinery.ModuleSpec | None:
        known = name.partition(".")[0] in self.packages
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if known else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return StandInModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None: ...


def project_of(path: str, script: Path) -> Path:
    """The folder that ``path`` is relative to: this one, one above it, or one above the script."""
    for folder in (Path.cwd(), *Path.cwd().parents, *script.resolve().parents):
        if (folder / path).is_file():
            return folder
    raise Impossible(f"{path} is neither below {Path.cwd()} nor above {script}; run this in the project's folder")


def use_project(path: str, folders: Sequence[str], script: Path) -> Path:
    """Make the project of the file ``path`` importable, and pytest_fusion a stand-in; the project's folder."""
    root = project_of(path, script)
    absent = {name for name in ("pytest", "hypothesis", "jaxtyping") if importlib.util.find_spec(name) is None}
    sys.meta_path.insert(0, Finder({"pytest_fusion", *absent}))
    sys.path[:0] = [str(root / folder) for folder in folders]
    return root


def judged_by(test: str, module: str, folders: Sequence[str], script: Path) -> tuple[Any, Any]:
    """The fused call and the reference of ``"file.py::Class::test"``, its module loaded under the name ``module``."""
    path, *names = test.split("::")
    root = use_project(path, folders, script)
    spec = importlib.util.spec_from_file_location(module, root / path)
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    sys.modules[module] = loaded
    spec.loader.exec_module(loaded)
    found: Any = loaded
    owner: Any = None
    for name in names:
        found, owner = getattr(found, name), found
    if not hasattr(found, "judged"):
        raise Impossible(f"{test} is no test of pytest-fusion any more")
    fused, reference = found.judged
    return functools.partial(fused, owner()) if inspect.isclass(owner) and fused is found else fused, reference


def named(path: str) -> Any:
    """What ``"package.module:Class.name"`` names."""
    module, _, names = path.partition(":")
    return functools.reduce(getattr, names.split("."), importlib.import_module(module))
