"""What all kernels of the suite share: layouts as row strides, argument checks, tile sizes, where a kernel may run.

The kernels see a tensor of any rank as *rows*: the last dimension is the row, the leading ones are folded into at
most three (``LEADING``) whose strides are free. So a transposed, sliced, padded or expanded tensor is read where it
lies, in one launch; only a tensor of five or more dimensions that do not fold is copied first (`Rows.of`).
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

LEADING = 3
FLOATS = (torch.float32, torch.float16, torch.bfloat16)

# Triton decides this when it decorates a kernel, hence once per process (triton#4972).
INTERPRETED: bool = bool(triton.knobs.runtime.interpret)


def jit(function: Callable[..., Any], **more: Any) -> Any:
    """`triton.jit`, for steps along a row without a look at whether they divide by 16.

    The step of a transposed tensor is its number of rows. Where that divided by 16 the compiler read several rows at
    once, threads held other columns, and sums along a row were taken in another order: 144 rows gave other bits than
    143 (batch invariance, seen on an H200). A step of 1, which is what loads in vectors need, is still specialised on.
    """
    steps = [name for name in inspect.signature(function).parameters if name.endswith("_step")]
    return triton.jit(function, do_not_specialize_on_alignment=steps, **more)


@jit
def row_offset(
    row: tl.tensor, size1: tl.tensor, size2: tl.tensor, stride0: tl.tensor, stride1: tl.tensor, stride2: tl.tensor
) -> tl.tensor:
    """Where ``row`` begins, in elements (int64): the index is taken apart over up to three leading dimensions.

    int64 throughout, because row x stride passes 2**31 elements in ordinary use (Liger-Kernel#803, vllm#43390). For a
    foldable tensor both sizes are 1, which Triton specialises on, and the divisions vanish.
    """
    row = row.to(tl.int64)
    outer = row // size2
    return (outer // size1) * stride0 + (outer % size1) * stride1 + (row % size2) * stride2


@jit
def _added(a: tl.tensor, b: tl.tensor, c: tl.tensor, d: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    return a + c, b + d


@jit
def row_sums(a: tl.tensor, b: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """The sums of two tiles along their rows, as columns: threads meet once for both."""
    return tl.reduce((a, b), 1, _added, keep_dims=True)


@jit
def covered(row: tl.tensor, rows: tl.tensor, column: tl.tensor, width: tl.tensor, EVEN: tl.constexpr) -> tl.tensor:
    """What there is of a tile, whose first row is there. Where tiles are ``EVEN``, divisors of the width, and of one
    row, the compiler knows that it is everything, and leaves out masks."""
    if not EVEN:
        return (row < rows) & (column < width)
    inside = tl.full([row.shape[0], column.shape[1]], True, tl.int1)
    if row.shape[0] > 1:
        inside = inside & (row < rows)
    return inside


@jit
def widened(x: tl.tensor) -> tl.tensor:
    """In float32; bfloat16 by its bits, which takes an instruction an element where the compiler's way takes 1.5."""
    if x.dtype == tl.bfloat16:
        return (x.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:  # noqa: RET505 -- compiled alone, or not at all
        return x.to(tl.float32)


@jit
def summed(
    x_row: tl.tensor,
    residual_row: tl.tensor,
    column: tl.tensor,
    inside: tl.tensor,
    x_step: tl.tensor,
    residual_step: tl.tensor,
    HAS_RESIDUAL: tl.constexpr,
    EVICT: tl.constexpr,
) -> tl.tensor:
    """One tile of an input in float32, or of its sum with a residual, rounded to the dtype of ``x``; 0 outside."""
    x = tl.load(x_row + column * x_step, mask=inside, other=0.0, eviction_policy=EVICT)
    wide = x.to(tl.float32)
    if HAS_RESIDUAL:
        wide += tl.load(residual_row + column * residual_step, mask=inside, other=0.0, eviction_policy=EVICT).to(
            tl.float32
        )
        wide = wide.to(x.dtype).to(tl.float32)
    return wide


@dataclass(frozen=True, slots=True)
class Rows:
    """Tensors of the same leading sizes, as the kernels read them: ``count`` rows; ``width`` is the first's last size.

    ``sizes`` are the folded leading sizes, outermost first; ``strides[i]`` has those of ``tensors[i]`` and, last, the
    stride along the row, all in elements.
    """

    count: int
    width: int
    sizes: tuple[int, int, int]
    tensors: tuple[torch.Tensor, ...]
    strides: tuple[tuple[int, int, int, int], ...]

    @property
    def layout(self) -> tuple[int, ...]:
        """What the kernels take for `row_offset`: the two inner sizes, then four strides for each tensor."""
        return (*self.sizes[1:], *(stride for four in self.strides for stride in four))

    @classmethod
    def of(cls, *tensors: torch.Tensor, trailing: int = 1) -> Rows:
        """Fold the leading dimensions of ``tensors`` together: all but the last ``trailing``, of equal sizes.

        Tensors whose dimensions do not fold into three are copied to contiguous memory, which always does.
        """
        shape = tensors[0].shape
        folded = _fold(shape[:-trailing], [tensor.stride()[:-trailing] for tensor in tensors])
        if folded is None:
            return cls.of(*(tensor.contiguous() for tensor in tensors), trailing=trailing)
        sizes, strides = folded
        return cls(
            count=sizes[0] * sizes[1] * sizes[2],
            width=shape[-1],
            sizes=sizes,
            tensors=tensors,
            strides=tuple((*leading, tensor.stride(-1)) for leading, tensor in zip(strides, tensors, strict=True)),
        )


def _fold(
    shape: Sequence[int], strides: Sequence[Sequence[int]]
) -> tuple[tuple[int, int, int], list[tuple[int, int, int]]] | None:
    """Merge neighbouring dimensions that have even steps in *every* tensor; ``None`` when more than three remain."""
    sizes: list[int] = []
    steps: list[list[int]] = [[] for _ in strides]
    for axis, size in enumerate(shape):
        if size == 1:
            continue
        if sizes and all(step[-1] == stride[axis] * size for step, stride in zip(steps, strides, strict=True)):
            sizes[-1] *= size
            for step, stride in zip(steps, strides, strict=True):
                step[-1] = stride[axis]
            continue
        sizes.append(size)
        for step, stride in zip(steps, strides, strict=True):
            step.append(stride[axis])
    if not sizes and shape:
        # One row keeps the stride that it would have among others: what Triton knows of it decides how a tile is spread
        # over threads, and so in which order a row is summed.
        sizes = [1]
        steps = [[stride[-1]] for stride in strides]
    if len(sizes) > LEADING:
        return None
    spare = LEADING - len(sizes)
    first, second, third = (*sizes, *[1] * spare)
    return (first, second, third), [(*step, *[0] * spare) for step in steps]  # type: ignore[misc]


@dataclass(frozen=True, slots=True)
class RowTile:
    """Elements per program, ``rows x columns``, and warps; ``loop`` when a row takes more than one tile."""

    rows: int
    columns: int
    warps: int
    loop: bool


def row_tile(width: int, *, whole: int, step: int, interpreted: bool = INTERPRETED) -> RowTile:
    """The tile for rows of ``width`` elements: one tile up to ``whole`` elements, steps of ``step`` beyond.

    Depends on the width alone, never on how many rows there are: a row's sum is then taken in the same order in every
    batch, which makes the result batch invariant. 32 elements per thread keep a bf16 row of 8192 at 8 warps within
    48 registers (cuobjdump, sm_90) and reached 0.97 of copy bandwidth on an H200; a loop hides its loads better with
    twice the warps.

    Interpreted, each operation costs some 20 us whatever its tile: a tile takes more rows there, and rows of a few
    hundred elements already loop, in small steps, so that small cases exercise the loop too.
    """
    if interpreted:
        whole, step = 128, 64 if width <= 512 else 1024
    loop = width > whole
    columns = step if loop else max(16, triton.next_power_of_2(width))
    rows = max(1, min(16, (4096 if interpreted else 2048) // columns))
    per_warp = 512 if loop else 1024
    warps = max(4, min(16, rows * columns // per_warp))
    return RowTile(rows, columns, warps, loop)


def placed(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Launch on ``device``: Triton takes the *current* CUDA device, which need not be the tensors'."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def check_tensor(
    kernel: str, name: str, tensor: torch.Tensor, like: torch.Tensor, dtypes: Sequence[torch.dtype]
) -> None:
    """Raise `TypeError` for a dtype outside ``dtypes``, `ValueError` for a device other than ``like``'s or a CPU
    tensor without the interpreter."""
    if tensor.dtype not in dtypes:
        allowed = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        found = str(tensor.dtype).removeprefix("torch.")
        raise TypeError(f"{kernel}: {name} is {found}, allowed: {allowed}; cast it first")
    if tensor.device != like.device:
        raise ValueError(f"{kernel}: {name} is on {tensor.device}, the input on {like.device}; move it there first")
    if tensor.device.type == "cpu" and not INTERPRETED:
        raise ValueError(
            f"{kernel}: {name} is on the CPU, where Triton only runs interpreted; move it to a CUDA device, "
            "or set TRITON_INTERPRET=1 before triton is first imported"
        )


def check_vector(
    kernel: str, name: str, vector: torch.Tensor, like: torch.Tensor, dtypes: Sequence[torch.dtype] = FLOATS
) -> None:
    """`check_tensor`, and `ValueError` unless ``vector`` has one element for each column of ``like``, called x."""
    check_tensor(kernel, name, vector, like, dtypes)
    if vector.shape != like.shape[-1:]:
        raise ValueError(
            f"{kernel}: {name} has shape {tuple(vector.shape)}, the last dimension of x needs ({like.shape[-1]},)"
        )


def check_apart(kernel: str, name: str, written: torch.Tensor | None, **others: torch.Tensor | None) -> None:
    """Raise `ValueError` where another tensor begins at the address of one that the kernel writes.

    Tensors that a compiler traces have no address.
    """
    if written is None or not written.numel() or torch.compiler.is_compiling():
        return
    for other, tensor in others.items():
        if tensor is not None and tensor.data_ptr() == written.data_ptr():
            raise ValueError(
                f"{kernel}: {name} is written, and {other} begins at the same address; give each memory of its own"
            )


def broadcast(tensor: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """`torch.broadcast_to`, with a stride of 0 in every dimension that ``tensor`` lacks.

    Torch gives one of size 1 the stride of contiguous memory instead: a mask of one row was read in other vectors than
    that of two, and a row was summed in another order (batch invariance, seen on an H200).
    """
    lacking = len(shape) - tensor.ndim
    return tensor.as_strided(tuple(shape), (*[0] * lacking, *tensor.broadcast_to(shape).stride()[lacking:]))


def broadcasts(shape: Sequence[int], target: Sequence[int]) -> bool:
    """Whether a tensor of ``shape`` expands to ``target``."""
    return len(shape) <= len(target) and all(
        size in (1, wanted) for size, wanted in zip(reversed(shape), reversed(target), strict=False)
    )
