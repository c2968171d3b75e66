"""Switches the interpreter on: sets ``TRITON_INTERPRET`` before Triton is imported and corrects Triton right after."""

from __future__ import annotations

import gc
import importlib
import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from pytest_fusion.errors import FusionError
from pytest_fusion.interpreter.bridge.lane_state import STATE

TOO_EARLY = (
    "Triton was imported, and this kernel made, before the CPU lane switched its interpreter on, so it would be "
    "compiled for a GPU. Something imports it early (a conftest, another plugin, sitecustomize): set "
    "TRITON_INTERPRET=1 in the environment, or import it later"
)


def enable() -> None:
    """Interpret every Triton kernel of this process. Call before user modules are imported.

    Triton reads the switch during its import: after an import without it, this only sets ``problem()``.
    """
    os.environ["TRITON_INTERPRET"] = "1"
    after_import("torch", _patch_torch)
    if not _imported("triton"):
        after_import("triton", lambda module: _install_or_refuse())
    elif "triton.runtime.interpreter" in sys.modules:
        _install_or_refuse()
    else:
        STATE.problem = TOO_EARLY


def install() -> None:
    """Check and correct the imported Triton, once; raises ``UnsupportedTritonError`` if its names are unknown."""
    if STATE.installed:
        return
    triton = importlib.import_module("triton")
    interpreter: Any = importlib.import_module("triton.runtime.interpreter")
    autotuner: Any = importlib.import_module("triton.runtime.autotuner")

    from pytest_fusion.interpreter.bridge import builder, contract, language, launcher
    from pytest_fusion.interpreter.control.rewrite import RUNTIME
    from pytest_fusion.interpreter.control.runtime import KernelRuntime
    from pytest_fusion.interpreter.memory import memory_findings

    STATE.version = str(triton.__version__)
    STATE.problem = contract.check(STATE.version, interpreter, autotuner)
    chained = not hasattr(interpreter, "BlockPointerHandle")
    runtime = KernelRuntime(interpreter.tl, interpreter.interpreter_semantic, interpreter.TensorHandle, chained)
    memory_findings.configure(RUNTIME, str(Path(str(triton.__file__)).parent))
    builder.patch(interpreter)
    language.patch(interpreter, runtime)
    launcher.Launcher(interpreter, runtime).patch()
    launcher.refuse_gluon(importlib.import_module("triton.runtime.jit").JITFunction)
    choose_without_timing(autotuner.Autotuner)
    STATE.installed = True
    if _imported("torch"):
        _patch_torch(sys.modules["torch"])


def choose_without_timing(autotuner_class: Any) -> None:
    """Make ``@triton.autotune`` choose the first config that survives pruning, without a device to time on.

    Only the measurement is replaced. After it, as after a benchmark on a GPU, Triton's code clears the tensors of
    ``reset_to_zero`` and leaves those of ``restore_value``. ``run.autotuned.launched`` launches another config.
    """

    def bench(self: Any, *args: Any, config: Any, **meta: Any) -> list[float]:
        conflicts = meta.keys() & config.kwargs.keys()
        if conflicts:
            raise ValueError(
                f"{', '.join(sorted(conflicts))} of kernel {self.base_fn.__name__} is set both by the launch and by an "
                "autotune config; leave it out of the launch"
            )
        return [1.0] * 3

    autotuner_class._bench = bench


# `triton.jit` passes these to the interpreted function; the compiled one has them as attributes.
_OPTIONS = ("version", "do_not_specialize", "do_not_specialize_on_alignment", "debug", "noinline", "launch_metadata")


def adopt() -> None:
    """Turn every kernel of this process into what ``triton.jit`` makes with ``TRITON_INTERPRET=1``, and hide all GPUs.

    For a forked child that has not started CUDA and computes nothing else. Objects stay the same, for all that refer to
    them (autotuners, globals). Raises ``UnsupportedTritonError`` if the installed Triton cannot be interpreted.
    """
    os.environ["TRITON_INTERPRET"] = "1"
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    install()
    compiled: Any = importlib.import_module("triton.runtime.jit").JITFunction
    interpreted: Any = importlib.import_module("triton.runtime.interpreter").InterpretedFunction
    # An object's class can change to a subclass only: the two classes have different layouts.
    own = {name: value for name, value in vars(interpreted).items() if name not in ("__dict__", "__weakref__")}
    adopted: Any = type("AdoptedFunction", (compiled, interpreted), own)
    gc.unfreeze()  # objects frozen before the fork are not listed
    for kernel in gc.get_objects():
        # Subclasses are Gluon's, whose language is not interpreted.
        if type(kernel) is compiled:
            twin = interpreted(kernel.fn, **{name: getattr(kernel, name, None) for name in _OPTIONS})
            kernel.__class__ = adopted
            kernel.__dict__.clear()
            kernel.__dict__.update(twin.__dict__)


def _install_or_refuse() -> None:
    """``install()``; if that fails, every launch raises the reason."""
    try:
        install()
    except FusionError as error:
        STATE.problem = str(error)
        reason = error
        jit: Any = importlib.import_module("triton.runtime.jit")

        def refuse(self: Any, grid: Any) -> Any:
            raise reason

        jit.KernelInterface.__getitem__ = refuse


def _patch_torch(torch: ModuleType) -> None:
    from pytest_fusion.interpreter.bridge import modelled_device

    modelled_device.model_cuda(torch)
    modelled_device.unwrap_triton_op(torch)
    if STATE.installed:
        modelled_device.model_driver(torch)


def _imported(name: str) -> bool:
    """Whether the import of ``name`` has finished; torch imports Triton while it imports some of its own modules."""
    module = sys.modules.get(name)
    return module is not None and not getattr(module.__spec__, "_initializing", False)


def after_import(name: str, action: Callable[[ModuleType], None]) -> None:
    """Run ``action(module)`` now if ``name`` is imported, otherwise when its import has finished."""
    if _imported(name):
        action(sys.modules[name])
        return
    for finder in sys.meta_path:
        if isinstance(finder, _AfterImport) and finder.name == name:
            return
    sys.meta_path.insert(0, _AfterImport(name, action))


class _AfterImport(importlib.abc.MetaPathFinder):
    """A finder that adds the action to the loader that another finder has for ``name``."""

    def __init__(self, name: str, action: Callable[[ModuleType], None]) -> None:
        self.name = name
        self._action = action

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self.name:
            return None
        for finder in sys.meta_path:
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(fullname, path, target)
            if spec is not None and spec.loader is not None:
                self._follow(spec.loader)
                return spec
        return None

    def _follow(self, loader: Any) -> None:
        """Run the action, and remove the finder, once this loader has executed the module."""
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            del loader.exec_module
            execute(module)
            if self in sys.meta_path:
                sys.meta_path.remove(self)
            self._action(module)

        loader.exec_module = exec_module
