"""Random models train what a plain loop trains, or are refused before the first step."""

from __future__ import annotations

from pathlib import Path

import pytest
from fuzzed_models import BUILT, INNER, LOSSES, OUTSIDE, STREAM, Fuzzed, idioms_of
from models_table import GOOD, LAYOUTS, outcome

SEEDS = 60  # of each, one layout: the next one for the next seed
NAMES = list(LAYOUTS)

# What was found by them, before it was mended: the seed, and its layout.
FOUND = [
    (7, "zero 3, recomputed"),  # Python's random numbers were drawn again
    (39, "zero 3, recomputed"),  # numpy's
    (11, "zero 3, recomputed"),  # a buffer that a block counts in was counted twice
    (26, "zero 3, recomputed"),  # running statistics
    (57, "zero 3, recomputed"),  # a number that a block counts in
    (37, "zero 3, recomputed"),  # a hook on the block's input was registered twice
    (8, "interleaved"),  # a number that only the last chunk counts in
    (10, "layer-major, offload"),  # what a block leaves for the loss was another micro-batch's
    (43, "layer-major, offload"),  # noise
    (59, "layer-major, offload"),  # an order of samples
    (17, "tp"),  # in bf16, a maximum over features was within what was allowed
    (21, "tp"),  # a hook saw the slice of a gradient
    (66, "tp"),  # a hook on a weight was lost
    (29, "tp"),  # in bf16, a number read off a slice was
    (161, "tp"),  # and a maximum whose slopes are flat
    (213, "sequence"),  # a branch on the mean of some tokens
    (121, "interleaved"),  # of a batch norm of all but equal values, rounding is no difference
    (725, "tp"),  # in bf16, a branch on a mean that rounding makes positive or negative
    (443, "sequence"),  # tokens in another order, behind a mask that was drawn as 0 by the check
    (2242, "tp"),  # a median of a slice
    (2476, "sequence"),  # what mixed tokens behind a value that was read
    (42, "sequence"),  # blocks in another order than that of registration
    (260, "pp"),  # a ghost hung a hook on what had come from another stage
]


@pytest.mark.parametrize("seed", range(SEEDS))
def test_a_random_model_trains_or_is_refused(ranks, tmp_path: Path, seed: int) -> None:
    found = outcome(ranks, seed, NAMES[seed % len(NAMES)], tmp_path)
    assert found.kind in (*GOOD, "invalid"), (found, idioms_of(seed))


@pytest.mark.parametrize(("seed", "layout"), FOUND)
@pytest.mark.at_most(8)
def test_what_was_found_is_mended(ranks, tmp_path: Path, seed: int, layout: str) -> None:
    found = outcome(ranks, seed, layout, tmp_path)
    assert found.kind in ("equal", "refused"), (found, idioms_of(seed))


def test_models_have_many_idioms() -> None:
    assert sum(map(len, (INNER, STREAM, OUTSIDE, LOSSES, BUILT))) >= 80
    used = {(idiom.table, idiom.name) for seed in range(3000) for idiom in idioms_of(seed)}
    assert len(used) >= 80


def test_a_model_can_be_made_smaller() -> None:
    idioms = idioms_of(42)
    left = Fuzzed(42, without=range(len(idioms)))
    assert [block.inner for block in left.blocks] == [["gelu"]] * 4
    assert not left.turns_round
