"""Tiles that the tuner tries: every kernel's own kind, not too many, within a multiprocessor, and put back."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks.suite.candidates import SHARED, others
from benchmarks.suite.families import rows
from benchmarks.suite.tunables import TUNABLES, Tunable, chosen, functions, taken
from benchmarks.suite.tune import Tried, best
from reference_kernels._common import RowTile
from reference_kernels.decode_attention.kernel import config as decode
from reference_kernels.flash_attention.kernel import config as attention
from reference_kernels.linear.products import config as matmul
from reference_kernels.moe_gate.kernel import config as gate
from reference_kernels.sampling.kernel import config as sampling

BF16 = torch.bfloat16
MOST = 90


@pytest.mark.parametrize(
    ("tile", "arguments"),
    [
        (RowTile(1, 8192, 8, False), (8192,)),
        (RowTile(2, 1024, 4, False), (1024,)),
        (RowTile(1, 8192, 16, True), (131072,)),
        ((RowTile(1, 8192, 16, False), 132), (8192, 16384)),
        ((RowTile(4, 512, 4, False), 64), (8192, 8192)),
        (matmul(8192, 8192, 8192, BF16, interpreted=False), (8192, 8192, 8192)),
        (matmul(64, 6144, 4096, BF16, interpreted=False), (64, 6144, 4096)),
        (attention(128, BF16, interpreted=False), (128,)),
        (decode(8, 128, 8192, BF16, BF16, interpreted=False), (8, 128, 8192)),
        (sampling(256, 128256, torch.device("cpu"), interpreted=False), (256, 128256)),
        (gate(256, interpreted=False), (256,)),
        (4, (BF16,)),
    ],
    ids=str,
)
def test_a_tile_has_some_dozens_of_others(tile: Any, arguments: tuple[Any, ...]) -> None:
    """All different, of its own kind, and the one in use is not among them."""
    found = others(tile, arguments)
    assert 3 <= len(found) <= MOST
    assert len({repr(each) for each in found}) == len(found)
    assert tile not in found
    assert {type(each) for each in found} == {type(tile)}


def test_products_fit_into_shared_memory() -> None:
    """A tile that does not would only waste a compilation."""
    found = others(matmul(8192, 8192, 8192, BF16, interpreted=False), (8192, 8192, 8192))
    assert max((each.m + each.n) * each.k * 2 * each.stages for each in found) <= SHARED


def test_a_row_is_whole_or_in_steps() -> None:
    """A tile that does not loop holds the row; one that loops is narrower than the row."""
    for each in others(RowTile(1, 16384, 16, False), (12000,)):
        assert each.columns < 12000 if each.loop else each.columns >= 12000


def test_an_unknown_kind_of_tile_is_refused() -> None:
    """With the place to add it to."""
    with pytest.raises(TypeError, match="add it to VARIED"):
        others(object(), ())


@pytest.mark.parametrize("tunable", TUNABLES, ids=lambda each: each.name)
def test_every_tunable_is_there_and_has_rows(tunable: Tunable) -> None:
    """A function of its place exists in the module that calls it, unless the kernel does not; so do its rows."""
    found, absent = rows()
    if not functions(tunable.place):
        assert any(tunable.place.split(".")[0] in why for why in absent.values())
        return
    for start in tunable.rows:
        assert any(row.name.startswith(start) for row in found), start
    for row in rows()[0]:
        if any(row.name.startswith(start) for start in tunable.rows) and tunable.span == "both":
            assert row.backward, row.name


def test_names_choose_what_is_tuned() -> None:
    """By the beginning of their names; a name that fits nothing is refused with those that are known."""
    assert {each.name for each, _ in chosen(["softmax"], rows()[0])} == {"softmax", "softmax backward"}
    with pytest.raises(ValueError, match="known: pointwise"):
        chosen(["sofmax"], rows()[0])


def test_a_config_is_replaced_for_what_was_first_asked() -> None:
    """Other arguments get what the kernel's own function says, and afterwards it is back."""
    from reference_kernels.softmax import kernel

    original = kernel.config
    with taken("softmax.kernel:config") as knob:
        first = kernel.config(1000)
        assert (knob.asked, knob.current) == ((1000,), first)
        knob.answer = RowTile(1, 2048, 32, False)
        assert kernel.config(1000) == knob.answer
        assert kernel.config(500) == original(500)
    assert kernel.config is original


def test_the_shown_tiles_begin_with_the_one_in_use() -> None:
    """Then come the finalists from the fastest on; tiles that were only tried briefly are in the file alone."""
    tried = [
        Tried("softmax", "row", "in use", 2.0, 1.0, True),
        Tried("softmax", "row", "slower", 3.0, 1.5, True),
        Tried("softmax", "row", "faster", 1.0, 0.5, True),
        Tried("softmax", "row", "brief", 9.0, 4.5),
        Tried("softmax", "row", "broken", words="wrong: it differs"),
    ]
    assert [each.tile for each in best(tried)] == ["in use", "faster", "slower"]
    words = [Tried("softmax", "row", "-", words="RuntimeError: no memory")]
    assert best(words) == words
    assert "| softmax, row | faster | 1000000.0 | 0.500 |" in tried[2].line()
