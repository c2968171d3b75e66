"""Causes in the layout of tensors: strides, storage offsets, alignment, offsets past 2^31."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from pytest_fusion.case import strided
from pytest_fusion.case.case_model import Case, Layout
from pytest_fusion.case.layouts import geometry
from pytest_fusion.case.make import shape_of, torch_dtype
from pytest_fusion.checks import probe as probing
from pytest_fusion.diagnosis.experiments import Answer, Found, Lab

# Rows at multiples of so many bytes suit every vector access of a GPU (at most 16 bytes) and any cache line.
_ALIGNED_BYTES = 128
_INT32 = 2**31
# 16 bytes of a 16-bit dtype.
_VECTOR = 8
# A search or a comparison meets values from elsewhere by luck: with few elements in one of eight seeds.
_SEEDS, _LUCKY_SEEDS = 4, 16


def layout(lab: Lab) -> Found | None:
    """Wrong in this layout, right on contiguous copies of the same values, at these sizes and at larger ones."""
    case = lab.base
    bent = [name for name, tensor in case.tensors.items() if not tensor.layout.plain and name not in case.absent]
    if not bent:
        return None
    plain = case.contiguous()
    seeds = lab.seeds(case, _SEEDS)
    copies = [lab.attempt(case.with_(seed=seed), laid=plain.with_(seed=seed)) for seed in seeds]
    if any(answer.wrong for answer in copies):
        lab.ruled_out.append("layout: wrong on contiguous copies too")
        # Not if the failure needs values that repeat along an axis.
        if any(lab.attempt(plain.with_(seed=seed)).wrong for seed in lab.seeds(plain)):
            lab.base = plain
        return None
    if lab.spent and copies[0].right:
        evidence = ["right on a contiguous copy of the same values; there was no time for others"]
        return Found("ignores-strides" if _strided(lab, case, bent) else "ignores-offset", evidence)
    if not all(answer.right for answer in copies):
        return None
    wrong_as_laid = sum(lab.attempt(case.with_(seed=seed)).wrong for seed in seeds)
    for seed in lab.seeds(case, _LUCKY_SEEDS)[_SEEDS:]:
        if wrong_as_laid >= _SEEDS // 2:
            break
        if lab.attempt(case.with_(seed=seed)).wrong:
            if not lab.attempt(case.with_(seed=seed), laid=plain.with_(seed=seed)).right:
                return None
            seeds.append(seed)
            wrong_as_laid += 1
    if wrong_as_laid < _SEEDS // 2:
        return None
    if (wrong := _wrong_when_larger(lab, plain)) is not None:
        sizes = ", ".join(f"{name}={size}" for name, size in wrong.sizes.items())
        lab.ruled_out.append(f"layout: wrong on contiguous tensors too at {sizes}")
        lab.base = wrong
        return None
    evidence = [f"right on contiguous copies of the same values, for {len(seeds)} seeds"]
    guilty = [name for name in bent if lab.attempt(case, laid=case.contiguous([name])).right]
    if len(bent) > 1 and len(guilty) == 1:
        evidence.append(f"making {guilty[0]} alone contiguous is enough")
    offsets = [name for name in bent if geometry(_shape(lab, case, name), case.tensors[name].layout).offset]
    bent_strides = _strided(lab, case, bent)
    if _past_int32(lab, case):
        return Found("int32-overflow", ["an offset passes 2^31 elements, and a compact copy is right", *evidence])
    if offsets and bent_strides:
        # If the failure stays without one of the two, that one is not its cause.
        without = lab.attempt(case, laid=_without_offsets(lab, case, bent))
        bent_strides = [] if without.right else bent_strides
    if bent_strides:
        return _of_strides(lab, case, bent_strides, evidence)
    return _of_offset(lab, case, offsets, evidence)


def _wrong_when_larger(lab: Lab, plain: Case) -> Case | None:
    """A larger contiguous case that fails without the layout, which only made the failure visible in a small one."""
    candidates = [lab.grown(plain), lab.grown(plain, (17, 19, 18, 21)), lab.grown(plain, (33, 9, 35))]
    for block in lab.blocks[:2]:
        candidates += [case for name in lab.plain_sizes() if (case := lab.resized({name: block + 1}, plain))]
    for case in {candidate.key(): candidate for candidate in candidates}.values():
        if case.key() != plain.key() and lab.mostly_wrong(case):
            return case
    return None


def _shape(lab: Lab, case: Case, name: str) -> tuple[int, ...]:
    return shape_of(lab.spec.tensors[name], case.sizes)


def _strided(lab: Lab, case: Case, names: Iterable[str]) -> list[str]:
    return [
        name
        for name in names
        if geometry(shape := _shape(lab, case, name), case.tensors[name].layout).strides
        != geometry(shape, Layout()).strides
    ]


def _without_offsets(lab: Lab, case: Case, names: Iterable[str]) -> Case:
    """The same strides without a storage offset."""
    for name in names:
        old = case.tensors[name].layout
        before = geometry(_shape(lab, case, name), old).offset - old.offset
        case = case.with_tensor(name, layout=Layout(old.kind, -before, old.variant))
    return case


def _past_int32(lab: Lab, case: Case) -> bool:
    plans = [geometry(_shape(lab, case, name), tensor.layout) for name, tensor in case.tensors.items()]
    return any(
        plan.storage > _INT32 or any(abs(s) * (n - 1) >= _INT32 for n, s in zip(plan.shape, plan.strides, strict=True))
        for plan in plans
    )


def _of_offset(lab: Lab, case: Case, names: list[str], evidence: list[str]) -> Found:
    """Distinguish an address that is aligned, by whole cache lines, but not the storage's start."""
    aligned = case
    for name in names:
        items = _ALIGNED_BYTES // torch_dtype(case.tensors[name].dtype).itemsize
        aligned = aligned.with_tensor(name, layout=Layout("contiguous", items))
    answers = [lab.attempt(case.with_(seed=s), laid=aligned.with_(seed=s)) for s in lab.seeds(case)]
    shown = ", ".join(names)
    if answers and all(answer.right for answer in answers):
        evidence.append(f"right with {shown} at a storage offset of {_ALIGNED_BYTES} bytes: only its alignment matters")
        return Found("needs-alignment", evidence)
    evidence.append(f"wrong with {shown} at any storage offset, aligned ones too")
    if (read := _reads(lab, case, from_start=True)) is not None:
        evidence.append(f"equals the reference on {read} read from the start of its storage")
    return Found("ignores-offset", evidence)


def _of_strides(lab: Lab, case: Case, names: list[str], evidence: list[str]) -> Found:
    pitched = [name for name in names if case.tensors[name].layout.kind in ("padded", "unflattenable")]
    laid = _pitched(lab, case, names) if pitched == names else None
    if laid is not None and all(
        lab.attempt(case.with_(seed=s), laid=laid.with_(seed=s)).right for s in lab.seeds(case)
    ):
        evidence.append(f"right with rows of {', '.join(names)} that begin at multiples of {_ALIGNED_BYTES} bytes")
        return Found("needs-alignment", evidence)
    if (fact := _right_at_whole_vectors(lab, case, names)) is not None:
        return Found("tail-mask", [*evidence, fact])
    if (read := _reads(lab, case, from_start=False)) is not None:
        evidence.append(f"equals the reference on the storage of {read} read as contiguous")
    return Found("ignores-strides", evidence)


def _pitched(lab: Lab, case: Case, names: Iterable[str]) -> Case | None:
    """The case with rows on whole cache lines and its gaps between matrices; ``None`` if a tensor has no rows."""
    for name in names:
        shape = _shape(lab, case, name)
        if len(shape) < 2:
            return None
        laid = Layout("pitched", 0, _ALIGNED_BYTES // torch_dtype(case.tensors[name].dtype).itemsize)
        own, pitched = geometry(shape, case.tensors[name].layout).strides, list(geometry(shape, laid).strides)
        if any(own[axis] != own[axis + 1] * shape[axis + 1] for axis in range(len(shape) - 2)):
            for axis in reversed(range(len(shape) - 2)):
                pitched[axis] = pitched[axis + 1] * (shape[axis + 1] + 1)
            laid = Layout(strided.stated(pitched))
        case = case.with_tensor(name, layout=laid)
    return case


def _right_at_whole_vectors(lab: Lab, case: Case, names: list[str]) -> str | None:
    """That the strides are right if rows hold whole vectors, as text: only the rest of a row is wrong."""
    dims = dict.fromkeys(
        dim
        for name in names
        for dim in lab.plain_sizes()
        if lab.axes_of(dim, case).get(name) == len(_shape(lab, case, name)) - 1
    )
    larger = lab.grown(case)
    for dim in dims:
        whole = [lab.resized({dim: n}, larger) for n in (_VECTOR, 2 * _VECTOR)]
        rest = [lab.resized({dim: n}, larger) for n in (_VECTOR + 1, 2 * _VECTOR + 1)]
        # The strides themselves must be as odd at whole vectors.
        if any(one is None or len(_strided(lab, one, names)) < len(names) for one in whole):
            continue
        # A path for aligned rows only may ignore their pitch; whole vectors with an odd pitch take another path.
        whole += [one for each in whole if each is not None and (one := _pitched(lab, each, names)) is not None]
        if all(lab.mostly_wrong(one) for one in rest) and all(lab.always_right(one) for one in whole):
            return f"right as laid too at {dim}={_VECTOR} and {2 * _VECTOR}, wrong at {_VECTOR + 1}"
    return None


def _reads(lab: Lab, case: Case, *, from_start: bool) -> str | None:
    """The input whose storage, read in another way, gives the kernel's result in the reference."""
    bent = [name for name, tensor in case.tensors.items() if not tensor.layout.plain and name not in case.absent]
    answer = lab.attempt(case)
    return next((name for name in bent if _equals_when_read(lab, answer, name, from_start=from_start)), None)


def _equals_when_read(lab: Lab, answer: Answer, name: str, *, from_start: bool) -> bool:
    found, wrong = answer.probe, lab.wrong_of(answer)
    if found is None or wrong is None or found.placed is None or not wrong.got.is_floating_point():
        return False
    t = found.placed.tensors[name].detach()
    strides = t.stride() if from_start else geometry(tuple(t.shape), Layout()).strides
    offset = 0 if from_start else t.storage_offset()
    if t.numel() == 0 or math.prod(t.shape) + offset > t.untyped_storage().size() // t.element_size():
        return False
    try:
        read = torch.as_strided(t, t.shape, strides, offset).clone()
    except RuntimeError:
        return False
    other = probing.right_of(lab.context, {**found.logical, name: read})
    right = None if other is None else other.get(wrong.name)
    if right is None or right.shape != wrong.got.shape or not right.is_floating_point():
        return False
    tolerance = 16 * torch.finfo(wrong.got.dtype).eps
    return torch.allclose(wrong.got.double(), right.double(), tolerance, tolerance, equal_nan=True)
