"""Every private name of torch that the package touches is there and means what it did.

Torch promises nothing about them. A name is listed here with what must hold of it, or the package may not use it.
"""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from pytest_fusion.interpreter.bridge import contract

PACKAGE = Path(__file__).parents[2] / "pytest_fusion"


def _parameters(*names: str) -> Callable[[Any], bool]:
    """Whether a function takes parameters of these names first."""
    return lambda function: tuple(inspect.signature(function).parameters)[: len(names)] == names


def _is_class(value: Any) -> bool:
    return isinstance(value, type)


def _has(*names: str) -> Callable[[Any], bool]:
    return lambda value: all(hasattr(value, name) for name in names)


def _writes(schema: Any) -> list[bool]:
    return [a.alias_info is not None and a.alias_info.is_write for a in schema.arguments]


# Path -> what must hold of the value there.
NAMES: dict[str, Callable[[Any], bool]] = {
    # Dispatch: which kernels an operator has, and which modes see it.
    "torch._C.DispatchKey": _has("CPU", "CUDA"),
    "torch._C.DispatchKeySet": lambda kind: kind(torch._C.DispatchKey.CPU).has(torch._C.DispatchKey.CPU),
    "torch._C.DisableTorchFunctionSubclass": _has("__enter__", "__exit__"),
    "torch._C._dispatch_has_kernel_for_dispatch_key": lambda has: (
        has("aten::reshape", "CompositeImplicitAutograd") and not has("aten::add.Tensor", "CompositeImplicitAutograd")
    ),
    "torch._C._dispatch_has_computed_kernel_for_dispatch_key": lambda has: has("aten::add.Tensor", "CPU"),
    "torch.autograd._engine_run_backward": callable,
    "torch._C._demangle": lambda demangled: (demangled("_Z1fi"), demangled("_Z?")) == ("f(int)", "_Z?"),
    "torch._C._len_torch_dispatch_stack": lambda length: length() == 0,
    "torch._ops.OpOverload": _has("redispatch", "decompose", "name", "tags", "namespace", "overloadpacket"),
    "torch.ops.aten.add_.Tensor._schema": lambda schema: (
        schema.name == "aten::add_" and _writes(schema) == [True, False, False] and schema.arguments[2].kwarg_only
    ),
    "torch.ops.aten.t.default._schema": lambda schema: (
        not schema.returns[0].alias_info.is_write and isinstance(schema.returns[0].type, torch.TensorType)
    ),
    "torch.ops.aten.add_.Tensor._overloadpacket": lambda packet: packet is torch.ops.aten.add_,
    "torch.ops.aten.reshape.default._can_decompose": lambda can: can() is True,
    # Every operation on lists has a kernel that does one tensor after the other.
    "torch.ops.aten._foreach_mul.Scalar._op_dk": lambda call: (
        call(torch._C.DispatchKey.CompositeExplicitAutograd, [torch.ones(2)], 3.0)[0].tolist() == [3, 3]
        and all(
            torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeExplicitAutograd")
            for name in torch._C._dispatch_get_all_op_names()
            if name.startswith("aten::_foreach_")
        )
    ),
    "torch.utils._python_dispatch.TorchDispatchMode": _has(
        "_should_skip_dynamo", "ignore_compile_internals", "supports_higher_order_operators", "__torch_dispatch__"
    ),
    "torch.utils._python_dispatch._get_current_dispatch_mode": lambda current: current() is None,
    "torch.utils._python_dispatch._disable_current_modes": _parameters(),
    "torch._decomp.decomposition_table": lambda table: torch.ops.aten.native_layer_norm.default in table,
    "torch._refs": lambda _: True,
    # Containers of an operator's arguments.
    "torch.utils._pytree.tree_map_only": lambda mapped: mapped(int, lambda x: x + 1, (1, "b")) == (2, "b"),
    "torch.utils._pytree.tree_map": lambda mapped: mapped(lambda a, b: a + b, (1, [2]), (3, [4])) == (4, [6]),
    "torch.utils._pytree.tree_leaves": lambda leaves: leaves((1, [2])) == [1, 2],
    # Tensors and memory.
    "torch.Tensor._version": lambda _: torch.ones(1).add_(1)._version == 1,
    "torch.UntypedStorage._cdata": lambda _: (
        (x := torch.ones(2)).untyped_storage()._cdata == x[1:].untyped_storage()._cdata
    ),
    "torch._C._to_dlpack": lambda capsule: type(capsule(torch.ones(1))).__name__ == "PyCapsule",
    "torch._C._set_grad_enabled": lambda enable: enable(torch.is_grad_enabled()) is None,
    "torch.cuda._sleep": _parameters("cycles"),
    "torch.cuda._tls": lambda _: "_tls.is_initializing = True" in inspect.getsource(torch.cuda._lazy_init),
    "torch._subclasses.fake_tensor.FakeTensor": _is_class,
    "torch._subclasses.fake_tensor.FakeTensorMode": _has("from_tensor", "__enter__"),
    # Compilers.
    "torch._dynamo.reset": _parameters(),
    "torch._dynamo.callback.callback_handler": _has(
        *(f"{verb}_{edge}_callback" for verb in ("register", "remove") for edge in ("start", "end"))
    ),
    "torch._dynamo.config": _has("patch", "recompile_limit", "accumulated_recompile_limit"),
    "torch._dynamo.exc": lambda exc: all(
        issubclass(e, exc.TorchDynamoException) for e in (exc.InternalTorchDynamoError, exc.BackendCompilerFailed)
    ),
    "torch._dynamo.utils.counters": lambda counters: counters["stats"]["no such count"] == 0,
    # Names the logger that says when a function is compiled no more.
    "torch._dynamo.convert_frame": lambda module: "hit config.%s" in inspect.getsource(module),
    "torch._inductor.config": lambda config: callable(config.patch) and isinstance(config.compile_threads, int),
    "torch._inductor.config.patch": callable,
    "torch._inductor.codecache.PyCodeCache": lambda cache: len(cache.modules) >= 0,
    # Custom operators.
    "torch._library": _has("triton", "wrap_triton"),
    "torch._library.custom_ops.OPDEFS": lambda found: all(isinstance(name, str) for name in found),
    "torch._library.triton.wrap_triton": _parameters("triton_kernel"),
    "torch._library.triton.triton_ops_to_kernels": lambda found: isinstance(found, dict),
}

# Private names of others: Python's, Hypothesis' (test_hypothesis_names), and Triton's beside those of its own contract.
OTHERS = {
    *("_asdict", "_replace", "_fields", "_exit", "_getframe", "_attributes", "_initializing"),
    *("_hypothesis_internal_settings_applied", "_hypothesis_internal_use_seed", "_hypothesis_internal_use_settings"),
    *("_hypothesis_internal_add_digest", "_get_local_constants"),
    *("_do_compile", "_init_handles", "_round_f32_to_tf32", "_triton_jit_function_registry"),
    *(part for path in (*contract._INTERPRETER, *contract._AUTOTUNER) for part in path.split(".")),
}


def _value_at(path: str) -> Any:
    """The value at a dotted path, with as much of it imported as is a module."""
    parts = path.split(".")
    value: Any = torch
    for i, part in enumerate(parts[1:], start=2):
        try:
            value = getattr(value, part)
        except AttributeError:
            try:
                value = importlib.import_module(".".join(parts[:i]))
            except ImportError:
                raise AttributeError(f"{path} is missing in torch {torch.__version__}") from None
    return value


def _broken(path: str, holds: Callable[[Any], bool]) -> str | None:
    """What is wrong with one name, in words."""
    try:
        ok = holds(_value_at(path))
    except Exception as error:  # noqa: BLE001 - whatever it raises, the name is not what it was
        return f"{path}: {error!r}"
    return None if ok else f"{path} is not what it was (torch {torch.__version__})"


def _private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def _chain(node: ast.expr) -> list[str]:
    """The names of ``a.b.c``; of ``f().b`` those after the call."""
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    return [*([node.id] if isinstance(node, ast.Name) else ["?"]), *names[::-1]]


def _own(tree: ast.AST) -> Iterator[str]:
    """The private names that a module defines: functions, classes, variables, fields, attributes, slots."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id


def _touched(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and name of every private name that may be another project's: a path of torch's, or a lone attribute."""
    inner: set[ast.expr] = set()
    for node in ast.walk(tree):
        match node:
            case ast.ImportFrom(module=str(module), names=names) if module.partition(".")[0] == "torch":
                paths = [f"{module}.{alias.name}" for alias in names]
                yield from ((node.lineno, path) for path in paths if any(map(_private, path.split("."))))
            case ast.Import(names=names):
                yield from ((node.lineno, alias.name) for alias in names if alias.name.startswith("torch._"))
            case ast.Constant(value=str(text)) if text.startswith("torch._") and text.replace(".", "").isidentifier():
                yield node.lineno, text
            case ast.Call(func=ast.Name(id="getattr" | "hasattr"), args=[_, ast.Constant(value=str(text)), *_]):
                if _private(text):
                    yield node.lineno, text
            case ast.Attribute() if node not in inner:
                part = node.value
                while isinstance(part, ast.Attribute):
                    inner.add(part)
                    part = part.value
                first, *names = _chain(node)
                if first == "torch" and any(map(_private, names)):
                    last = max(i for i, name in enumerate(names) if _private(name))
                    # A public name of a private module counts with it: torch._dynamo.reset.
                    yield node.lineno, ".".join(("torch", *names[: last + 2]))
                elif first not in ("self", "cls"):
                    yield from ((node.lineno, name) for name in names if _private(name))


@cache
def _package() -> dict[str, ast.Module]:
    return {str(path.relative_to(PACKAGE)): ast.parse(path.read_text("utf-8")) for path in PACKAGE.rglob("*.py")}


def _unlisted(trees: dict[str, ast.Module]) -> list[str]:
    """The private names that modules touch, that none of them defines and that no table lists."""
    known = {part for path in NAMES for part in path.split(".") if _private(part)} | OTHERS
    known |= {name for tree in trees.values() for name in _own(tree)}
    return [
        f"{module}:{line} {name}"
        for module, tree in trees.items()
        for line, name in _touched(tree)
        if (name not in known if "." not in name else not any(f"{path}.".startswith(f"{name}.") for path in NAMES))
    ]


def test_every_private_name_is_what_it_was() -> None:
    """Each is there and does what the package relies on; one that is not is named, with torch's version."""
    assert [found for path, holds in NAMES.items() if (found := _broken(path, holds))] == []


@pytest.mark.parametrize(
    ("path", "holds", "said"),
    [
        ("torch._dynamo.rest", callable, "torch._dynamo.rest is missing in torch"),
        ("torch._C._len_torch_dispatch_stack", lambda f: f() == 1, "_len_torch_dispatch_stack is not what it was"),
        ("torch.cuda._sleep", _parameters("seconds"), "torch.cuda._sleep is not what it was"),
    ],
)
def test_a_changed_name_is_seen(path: str, holds: Callable[[Any], bool], said: str) -> None:
    """One that is gone, that answers otherwise, or that takes other parameters."""
    assert said in str(_broken(path, holds))


def test_no_private_name_is_used_unlisted() -> None:
    """What the package touches of others' private names stands in a table of this folder."""
    assert _unlisted(_package()) == []


def test_no_name_is_listed_unused() -> None:
    """A name that the package no longer touches leaves the table."""
    used = {name for tree in _package().values() for _, name in _touched(tree)}

    assert [
        path
        for path in NAMES
        if path.rpartition(".")[2] not in used and not any(f"{path}.".startswith(f"{name}.") for name in used)
    ] == []


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("torch._C._get_nothing()", "torch._C._get_nothing"),
        ("import torch\ntorch._dynamo.mark(x)", "torch._dynamo.mark"),
        ("from torch._functorch import vmap", "torch._functorch.vmap"),
        ("from torch.utils._pytree import tree_any", "torch.utils._pytree.tree_any"),
        ("import torch._export", "torch._export"),
        ("sys.modules.get('torch._lazy.config')", "torch._lazy.config"),
        ("x.untyped_storage()._weak_ref()", "_weak_ref"),
        ("getattr(x, '_base', None)", "_base"),
    ],
)
def test_a_planted_name_is_seen(source: str, name: str) -> None:
    """Each way of touching a private name is found; a module's own names, and those listed, are not."""
    fine = "class Own:\n    def f(self):\n        self._mine = x._version\n\ntorch._C._to_dlpack(y._mine).shape\n"

    assert [found.partition(" ")[2] for found in _unlisted({"m.py": ast.parse(f"{fine}{source}\n")})] == [name]
