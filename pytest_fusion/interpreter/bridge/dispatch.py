"""Facts about torch's operators (what each writes, makes, copies, draws or views), and the base of dispatch modes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from pytest_fusion.case.containers import tensors_of

# torch's own kernels are not under test: memory that they allocate inside is not watched.
TORCH_NAMESPACES: Final = frozenset({"aten", "prim", "prims", "inductor", "profiler", "higher_order"})

# Memory with undefined content. torch.Tensor(n) and Tensor.new(n) arrive as aten.empty too.
_EMPTY: Final = frozenset("empty empty_like empty_strided empty_permuted new_empty new_empty_strided".split())
# Views, whatever the schema says; ``contiguous`` only if it copies nothing.
_LOOKS: Final = frozenset("_unsafe_view _reshape_alias lift lift_fresh alias detach contiguous".split())
# Copies of the first tensor, or of the second into the first (``copy_``), with no arithmetic but a cast.
_COPIES: Final = frozenset(
    "copy_ clone _to_copy copy lift_fresh_copy expand_copy view_copy permute_copy t_copy transpose_copy squeeze_copy "
    "unsqueeze_copy select_copy slice_copy diagonal_copy as_strided_copy detach_copy alias_copy unfold_copy "
    "narrow_copy view_as_real_copy view_as_complex_copy _reshape_alias_copy _conj_physical _reshape_copy".split()
)


@dataclass(frozen=True, slots=True)
class Schema:
    """An operator by its ``name``, without namespace and overload.

    ``writes``: position and name of each written argument. ``view``: the results share the arguments' memory.
    ``makes``: the schema says that the result is one new tensor. ``empty``: its memory has no values. ``copies``: it is
    a copy. ``draws``: the operator may draw random numbers.
    """

    namespace: str
    name: str
    writes: tuple[tuple[int, str], ...]
    view: bool
    makes: bool
    empty: bool
    copies: bool
    draws: bool


@lru_cache(maxsize=4096)
def schema(func: Any) -> Schema:
    """The facts about an overload."""
    namespace, _, name = func._schema.name.partition("::")
    writes = tuple((i, a.name) for i, a in enumerate(func._schema.arguments) if a.alias_info and a.alias_info.is_write)
    returns = func._schema.returns
    shown = bool(returns) and all(a.alias_info is not None and not a.alias_info.is_write for a in returns)
    aten = namespace == "aten"
    return Schema(
        namespace,
        name,
        writes,
        view=(shown and not writes) or (aten and name in _LOOKS),
        makes=aten
        and len(returns) == 1
        and returns[0].alias_info is None
        and isinstance(returns[0].type, torch.TensorType),
        empty=aten and name in _EMPTY,
        copies=aten and name in _COPIES,
        draws=torch.Tag.nondeterministic_seeded in func.tags,
    )


def written_by(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """The tensors among the arguments that the operator writes, by its schema."""
    return tensors_of([args[i] if i < len(args) else kwargs.get(name) for i, name in schema(func).writes])


def shares_memory(tensor: Tensor, others: Iterable[Tensor]) -> bool:
    """Whether it shares memory with one of these: dropout in evaluation returns its argument, against its schema."""
    try:
        if tensor.device.type == "meta":  # no addresses: all would be 0
            return any(other.untyped_storage()._cdata == tensor.untyped_storage()._cdata for other in others)
        # Without others no address is read: a fake tensor warns that it has none.
        return any(other.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr() for other in others)
    except (RuntimeError, NotImplementedError):  # a tensor without storage: sparse, fake, wrapped
        return any(tensor is other for other in others)


def has_kernel(func: Any, key: str) -> bool:
    """Whether a kernel was registered for just this dispatch key."""
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key))


def one_by_one(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """An ``aten::_foreach_*`` as operators on single tensors."""
    return func._op_dk(torch._C.DispatchKey.CompositeExplicitAutograd, *args, **kwargs)


def kernel_key(func: Any, types: Sequence[type], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The dispatch keys of ``func``'s kernel for its arguments; ``None`` for modes, subclasses and mixed devices."""
    if torch._C._len_torch_dispatch_stack() or any(kind is not Tensor for kind in types):
        return None
    devices = {t.device.type if t.layout is torch.strided else "other" for t in tensors_of((args, kwargs))}
    name = {"cpu": "CPU", "cuda": "CUDA"}.get(devices.pop()) if len(devices) == 1 else None
    if name is None or not torch._C._dispatch_has_computed_kernel_for_dispatch_key(func.name(), name):
        return None
    return torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, name))


class DispatchMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode whose handler torch does not wrap: the wrapper imports torch._dynamo, 1.9 s in a forked child."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()  # type: ignore[no-untyped-call]

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


class OperatorMode(DispatchMode):
    """A mode whose ``on_operator`` runs each operator; higher-order dispatch (``torch.cond``) passes through."""

    supports_higher_order_operators = True

    def on_operator(self, func: Any, types: Sequence[type], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        raise NotImplementedError

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if isinstance(func, torch._ops.OpOverload):
            return self.on_operator(func, types, args, kwargs or {})
        return func(*args, **(kwargs or {}))


class InnerMode(OperatorMode):
    """An operator mode that can stay active inside a user's custom operator, and inside compiled code."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """True: otherwise torch.compile silently runs everything eagerly while the mode is active."""
        return True

    def inside(
        self, func: Any, types: Sequence[type], args: Sequence[Any], kwargs: Mapping[str, Any], *others: Any
    ) -> Any:
        """Run ``func``; stay active, below the modes ``others``, inside a user's custom operator.

        Torch pops a mode while its handler runs, so for the operator's whole body, where a fused kernel allocates.
        Pushing it and calling the operator would return here; calling the kernel registered for the device does not.
        """
        key = None if func.namespace in TORCH_NAMESPACES else kernel_key(func, types, args, kwargs)
        if key is None:
            return func(*args, **kwargs)
        with ExitStack() as stack:
            for mode in (*others, self):
                stack.enter_context(mode)
            return func.redispatch(key, *args, **kwargs)
