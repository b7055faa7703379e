"""Random models train what a plain loop trains, or are refused before the first step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fuzzed_models import (
    BUILT,
    INNER,
    LOSSES,
    MORE_BUILT,
    MORE_LOSSES,
    MORE_STREAM,
    OUTSIDE,
    STREAM,
    Fuzzed,
    idioms_of,
)
from models_layouts import FAMILIES, Layout, layout_of, plain
from models_table import ALONE_S, GOOD, Program, outcome, program_of
from pool import RankPool
from small_jobs import small

from zrun_core.spine.config import JobConfig

SEEDS = 60  # of each, one layout: the next one for the next seed
NAMES = list(FAMILIES)

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

# The same of variants: the first idioms of a seed, and what its layout changed.
FOUND_ON = [
    # A stage never gave up what the root of the model has, and trained with its first values.
    (4673, Layout("pp", {"zero.stage": 3, "offload.param": "disk"})),
    # A penalty's gradients came before those of the block, and partial sums on a disk were lost.
    (1005, Layout("layer-major, offload", {"zero.stage": 1, "offload.optimizer": "disk"})),
    (1005, Layout("layer-major, offload", {"zero.stage": 0, "offload.optimizer": "disk"})),
    # The first forward was one of evaluation: running statistics were counted twice.
    (
        1008,
        Layout(
            "tp",
            {
                "parallel.plan": {"*.up": "colwise_gather_output"},
                "activations.checkpoint": "full",
            },
        ),
    ),
    (1022, Layout("tp", {"activations.checkpoint": "every_n", "precision.compute": "bf16"})),
    # A selective checkpoint counted operators of a gather.
    (
        1012,
        Layout(
            "zero 3, recomputed",
            {
                **{"zero.bucket": "1KiB", "offload.param": "disk", "batch.micro": 4},
                "activations.checkpoint": "selective",
            },
        ),
    ),
    # A rank alone found placeholders where the loss reads parameters that live on a disk.
    (2066, Layout("tp", {"zero.stage": 3, "offload.param": "disk"})),
    (2081, Layout("pp", {"zero.stage": 3, "offload.param": "disk"})),
]


@pytest.fixture(scope="module")
def alone_soon() -> Iterator[Callable[[int], RankPool]]:
    """Return pools whose ranks do not wait long for one that has failed."""
    pools = {size: RankPool(size, alone_s=ALONE_S) for size in (1, 2)}
    yield pools.__getitem__
    for pool in pools.values():
        pool.close()


@pytest.mark.parametrize("seed", range(SEEDS))
def test_a_random_model_trains_or_is_refused(alone_soon, tmp_path: Path, seed: int) -> None:
    program = program_of(seed, NAMES[seed % len(NAMES)])
    found = outcome(alone_soon, program, tmp_path)
    assert found.kind in (*GOOD, "invalid"), (found, str(program))


@pytest.mark.parametrize(("seed", "layout"), FOUND)
@pytest.mark.at_most(6)
def test_what_was_found_is_mended(ranks, tmp_path: Path, seed: int, layout: str) -> None:
    program = Program(seed, plain(layout, seed), more=False)
    found = outcome(ranks, program, tmp_path)
    assert found.kind in ("equal", "refused"), (found, str(program))


@pytest.mark.parametrize("family", FAMILIES)
def test_variants_are_jobs_and_differ(family: str) -> None:
    layouts = [layout_of(family, seed) for seed in range(500)]
    for layout in layouts:
        JobConfig.model_validate(small(model="models/fuzzed_models.py:Fuzzed", **layout.keys))
        assert layout.dims == plain(family, 0).dims
    assert len(set(map(str, layouts))) > 100
    assert 50 < sum("bf16" in str(layout) for layout in layouts) < 120
    assert str(layout_of(family, 7)) == str(layout_of(family, 7))


def test_a_second_generator_leaves_the_first_draw_as_it_was() -> None:
    for seed in range(100):
        first = idioms_of(seed)
        assert idioms_of(seed, more=True)[: len(first)] == first
    drawn = {i.name for seed in range(500) for i in idioms_of(seed, more=True)}
    assert drawn >= {*MORE_STREAM, *MORE_LOSSES, *MORE_BUILT}


@pytest.mark.parametrize(("seed", "layout"), FOUND_ON, ids=str)
@pytest.mark.at_most(4)
def test_what_was_found_on_a_variant_is_mended(
    ranks, tmp_path: Path, seed: int, layout: Layout
) -> None:
    found = outcome(ranks, Program(seed, layout, more=False), tmp_path)
    assert found.kind == "equal", (found, idioms_of(seed))


@pytest.mark.at_most(1)
def test_a_buffer_of_rounding_alone_is_no_difference(ranks, tmp_path: Path) -> None:
    """An average of what a batch norm returns: its means are zero but for rounding."""
    layout = Layout("pp", {"zero.stage": 3, "offload.param": "disk"})
    found = outcome(ranks, Program(3254, layout, without=(0, 2, 3)), tmp_path)
    assert found.kind == "equal", (found, idioms_of(3254, more=True))


@pytest.mark.parametrize("family", ["zero 3, recomputed", "pp", "tp"])
@pytest.mark.at_most(1)
def test_a_comparison_in_bf16_can_fail(ranks, tmp_path: Path, family: str) -> None:
    """A gradient that is half too large is no rounding; a tenth may be one, in this format."""
    program = Program(86, Layout(family, {"precision.compute": "bf16"}), more=False)
    assert outcome(ranks, program, tmp_path / "right").kind == "equal", str(program)
    found = outcome(ranks, program, tmp_path / "wrong", fault="half more of one gradient")
    assert found.kind == "silent", (found, str(program))


def test_models_have_many_idioms() -> None:
    assert sum(map(len, (INNER, STREAM, OUTSIDE, LOSSES, BUILT))) >= 80
    used = {(idiom.table, idiom.name) for seed in range(3000) for idiom in idioms_of(seed)}
    assert len(used) >= 80


def test_a_model_can_be_made_smaller() -> None:
    idioms = idioms_of(42)
    left = Fuzzed(42, without=range(len(idioms)))
    assert [block.inner for block in left.blocks] == [["gelu"]] * 4
    assert not left.turns_round
