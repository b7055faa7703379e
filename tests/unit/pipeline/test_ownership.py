"""The stages of a pipeline that have each parameter."""

from __future__ import annotations

from zrun_core.pipeline.ownership import owned, tied_stages
from zrun_core.pipeline.split import Split

SPLIT = Split(starts=(0, 2, 4, 5), num_blocks=6, pp=2)  # stage 0: blocks 0, 1, 4; 1: 2, 3, 5


def test_a_parameter_is_on_the_stages_whose_segments_use_it() -> None:
    uses = {"first": (0,), "both": (1, 4), "other": (3,), "head": (6,), "unused": ()}
    owners = owned(uses, SPLIT)
    assert owners == {
        "first": (0,),
        "both": (0,),
        "other": (1,),
        "head": (1,),
        "unused": (1,),
    }
    assert tied_stages(owners) == ()


def test_tied_parameters_are_on_the_stages_that_use_any_of_them() -> None:
    split = Split((0, 1, 2, 3), num_blocks=4, pp=4)
    owners = owned({"embed": (0, 4), "bias": (1, 3), "own": (2,)}, split)
    assert tied_stages(owners) == (0, 1, 3)
    assert owners == {"embed": (0, 1, 3), "bias": (0, 1, 3), "own": (2,)}


def test_one_stage_has_all() -> None:
    owners = owned({"embed": (0, 2), "unused": ()}, Split((0,), num_blocks=2, pp=1))
    assert set(owners.values()) == {(0,)}
    assert tied_stages(owners) == ()
