"""Bugs that even data hide: skewed indices and routings, sequences of no rows and of many, page tables with holes."""

from __future__ import annotations

from tests.quality.kernels import embedding_grad, experts, packed, pages, rows_added
from tests.quality.plant import GRADIENTS, HOLES, RAISES, READS, VALUES, WRITES, Plant, group

RACES = frozenset({"repeat"})

UNEVEN: tuple[Plant, ...] = (
    *group("experts", experts.make_spec, "tokens width slots experts", [
        ("drops-past-capacity", "B3", None, VALUES, "capacity-overflow", [(9, 1, 1, 4)]),
        ("overwrites-past-capacity", "B3", None, WRITES, "capacity-overflow racing-stores stale-memory",
         [(9, 1, 1, 4)]),
        ("ranks-in-6-bits", "C1", None, WRITES, "capacity-overflow racing-stores stale-memory",
         [(65, 1, 1, 4), (65, 1, 4, 4)]),
        ("tiles-of-twice-the-average", "C3", None, READS | HOLES, "capacity-overflow stale-memory uneven-data",
         [(17, 1, 1, 4)]),
        ("load-of-last-experts", "B5", None, HOLES, "unwritten-output uneven-data", [(1, 1, 1, 4)]),
        ("two-slots", "H4", None, VALUES, "unexplained wrong-index-map", [(1, 1, 3, 4)]),
    ]),
    *group("dense_gates", experts.make_dense_spec, "tokens slots", [
        ("divides-by-all", "H5", None, VALUES, "uneven-data unexplained", [(1, 3)]),
        ("last-of-repeats", "A3", None, VALUES, "wrong-index-map uneven-data", [(1, 3)]),
        ("adds-repeats", "E4", None, VALUES, "uneven-data unexplained", [(1, 3)]),
    ]),
    *group("packed", packed.make_spec, "total width sequences", [
        ("search-from-left", "A3", None, VALUES, "wrong-index-map off-by-one-mask", [(2, 1, 2)]),
        ("starts-marked-once", "C4", None, VALUES, "uneven-data zero-size wrong-index-map", [(1, 1, 2)]),
        ("shift-across-border", "A3", None, VALUES, "wrong-index-map off-by-one-mask", [(2, 1, 2)]),
        ("at-least-one-row", "C4", 81, READS, "uneven-data zero-size out-of-bounds", [(0, 1, 1), (1, 1, 2)]),
        ("divides-by-length", "C4", None, VALUES, "zero-size uneven-data", [(0, 1, 1)]),
        # The kinds that are wrong are 'empty last' and 'some empty': which sequences get no value.
        ("ends-with-the-last-row", "B5", 81, HOLES, "unwritten-output zero-size uneven-data", [(0, 1, 1)]),
        ("full-block-as-empty", "B1", None, VALUES, "tail-mask block-limit unexplained", [(8, 1, 1)]),
        ("twice-the-average", "C3", None, VALUES, "uneven-data", [(12, 1, 3), (9, 1, 5)]),
        ("bounds-pitch", "A1", None, READS | RAISES, "ignores-strides", [(0, 1, 1)]),
    ]),
    *group("offsets", packed.make_offsets_spec, "sequences", [
        ("in-16-bits", "C1", None, VALUES, "overflow unexplained", [(1,)]),
        ("in-bfloat16", "D1", None, VALUES, "low-precision-accumulation unexplained", [(1,)]),
    ]),
    *group("offsets_wide", packed.make_offsets_spec, "sequences", [
        ("in-32-bits", "C1", None, VALUES, "int32-overflow overflow unexplained", [(1,)]),
    ], total=5_000_000_000),
    *group("rows_added", rows_added.make_spec, "vocab width tokens", [
        ("assumes-sorted", "H4", 190, VALUES | RACES, "uneven-data racing-stores wrong-index-map", [(2, 1, 3)]),
        ("equal-neighbours-once", "H4", None, VALUES, "uneven-data unexplained", [(1, 1, 2)]),
        ("first-is-last", "H4", None, VALUES, "uneven-data unexplained", [(2, 1, 3)]),
        ("last-row-left-out", "B1", None, VALUES, "off-by-one-mask unexplained wrong-index-map", [(1, 1, 1)]),
        ("runs-of-16", "C3", None, VALUES, "capacity-overflow", [(1, 1, 17)]),
        ("sums-in-table-dtype", "D1", 92, VALUES, "low-precision-accumulation", [(1, 4, 33), (2, 2, 65)]),
        ("unused-rows", "B5", None, HOLES, "unwritten-output", [(1, 1, 0)]),
    ]),
    *group("embedding_grad_wide", embedding_grad.make_spec, "vocab width tokens", [
        ("sums-in-table-dtype", "D1", 88, GRADIENTS | RACES, "low-precision-accumulation nondeterministic",
         [(256, 5, 19), (256, 2, 32), (256, 1, 32)]),
    ], vocab=(200, 300)),
    *group("page_means", pages.make_spec, "pages page width batch most", [
        ("wraps-negative", "B4", None, VALUES, "uneven-data", [(20, 1, 1, 1, 3)]),
        ("reads-holes", "B4", None, READS, "out-of-bounds", [(20, 1, 1, 1, 1)]),
        ("pages-in-order", "A3", None, READS, "out-of-bounds uneven-data wrong-index-map",
         [(20, 1, 1, 3, 5), (20, 1, 3, 1, 2)]),
        ("holes-of-first-row", "A3", None, READS, "out-of-bounds uneven-data wrong-index-map", [(20, 1, 3, 2, 1)]),
        ("holes-unwritten", "B5", 51, HOLES, "unwritten-output uneven-data", [(20, 1, 1, 1, 1)]),
    ]),
    *group("pages_halved", pages.make_halved_spec, "pages width batch most", [
        ("once-for-each-entry", "F1", None, VALUES | RACES, "racing-stores racing-load capacity-overflow",
         [(1, 1, 1, 2), (1, 1, 2, 1)]),
    ]),
)  # fmt: skip
