"""A run that ended anywhere goes on bit for bit.

On another layout, from the same parameters and optimizer.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from forging import forge_record
from runs import job, look, losses, run

from zrun_core.train.trainer import Trainer


@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.at_most(3)
def test_resume_is_bit_identical(ranks, tmp_path, stage, precision, accumulation):
    keys = job(zero=stage, precision=precision, batch={"global": 8, "micro": 4 // accumulation})
    whole = ranks(2).run(run, keys, str(tmp_path / "whole"))
    cut = ranks(2).run(run, keys, str(tmp_path / "cut"), None, 5)
    rest = ranks(2).run(run, keys, str(tmp_path / "cut"), {})
    assert {**losses(cut[0]), **losses(rest[0])} == losses(whole[0])
    assert min(losses(rest[0])) == 4
    for rank in range(2):
        assert rest[rank]["digest"] == whole[rank]["digest"], rank


def assembled(results: list[dict[str, Any]]) -> dict[tuple[str, str], np.ndarray]:
    """Every state of every tensor, whole, from what the ranks write."""
    parts: dict[tuple[str, str], dict[int, np.ndarray]] = {}
    for result in results:
        for (tensor, state, start), data in result["parts"].items():
            held = parts.setdefault((tensor, state), {})
            assert start not in held, f"{state} of {tensor} is written twice"
            held[start] = data
    return {
        key: np.concatenate([held[start] for start in sorted(held)]) for key, held in parts.items()
    }


def same_tensors(left: list[dict[str, Any]], right: list[dict[str, Any]]) -> None:
    ours, theirs = assembled(left), assembled(right)
    assert ours.keys() == theirs.keys()
    for key, value in ours.items():
        np.testing.assert_array_equal(value, theirs[key], err_msg=str(key))
    scalars = [
        {name: each for one in results for name, each in one["scalars"].items()}
        for results in (left, right)
    ]
    assert scalars[0] == scalars[1]


LAYOUTS: list[tuple[int, int, dict[str, Any]]] = [
    *((stage, world_size, {}) for stage in range(4) for world_size in (1, 2, 3)),
    (1, 2, {"zero": {"stage": 1, "bucket": 2048}}),
    (2, 4, {"zero": {"stage": 2, "shard_group": 2}}),
    (3, 2, {"precision": "fp32"}),
]


def resharded(stage: int, **keys: Any) -> dict[str, Any]:
    """A job without dropout: its masks depend on the number of ranks."""
    model = {"call": "runs.py:Speaker", "args": {"dropout": 0.0, "norm": False}}
    batch = {"global": 12, "micro": 1}
    fixed = {"schedule": "constant"}
    return job(
        **{"zero": stage, "precision": "bf16", "model": model, "batch": batch, "lr": fixed, **keys}
    )


@pytest.fixture(scope="module")
def saved(ranks, tmp_path_factory) -> tuple[dict[str, str], list[dict[str, Any]], float]:
    """Six steps at stage 3 on 4 ranks in bf16.

    Where they are saved, what they hold, and the loss of the seventh.
    """
    run_dir = str(tmp_path_factory.mktemp("saved"))
    before = ranks(4).run(run, resharded(3, steps=6), run_dir)
    source = {"folder": f"{run_dir}/checkpoints"}
    after = ranks(4).run(run, resharded(3, steps=7), str(tmp_path_factory.mktemp("after")), source)
    return source, before, losses(after[0])[7]


@pytest.mark.parametrize(("stage", "world_size", "keys"), LAYOUTS)
@pytest.mark.at_most(3)
def test_another_layout_goes_on_with_the_same_tensors(
    ranks, saved, tmp_path, stage, world_size, keys
):
    source, before, next_loss = saved
    there = ranks(world_size).run(run, resharded(stage, steps=7, **keys), str(tmp_path), source)
    same_tensors([each["begun"] for each in there], before)
    assert losses(there[0]).keys() == {7}
    if "precision" not in keys:
        assert losses(there[0])[7] == pytest.approx(next_loss, rel=1e-6)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (
            {"model": {"call": "runs.py:Speaker", "args": {"dim": 8}}},
            "scale is [16] in the checkpoint and [8] in the model",
        ),
        (
            {"model": {"call": "runs.py:Speaker", "args": {"depth": 3}}},
            "no tensor blocks.2.norm.weight [16]",
        ),
        (
            {"model": {"call": "runs.py:Speaker", "args": {"depth": 1}}},
            "has a tensor blocks.1.norm.weight [16], which",
        ),
        (
            {"optim": {"name": "sgd"}},
            "was made with the optimizer adamw, and optim.name is sgd: write optim.name",
        ),
        (
            {"optim": {"args": {"amsgrad": True}}},
            "keeps exp_avg, exp_avg_sq, max_exp_avg_sq, step with the options",
        ),
    ],
)
@pytest.mark.at_most(3)
def test_what_does_not_fit_is_named(ranks, tmp_path, keys, words):
    ranks(2).run(run, job(steps=3), str(tmp_path))
    for result in ranks(2).run(run, job(**keys), str(tmp_path), {}):
        assert result["error"].startswith("CheckpointError: ")
        assert words in result["error"]


@pytest.mark.parametrize(
    ("shuffle", "steps", "length", "words"),
    [
        (
            True,
            3,
            44,
            "was saved at sample 24 of a dataset with 40 samples, which has 44 samples now: ",
        ),
        (
            False,
            3,
            16,
            "was saved at sample 24 of a dataset with 40 samples, which has 16 samples now: ",
        ),
        (
            False,
            6,
            44,
            "was saved at sample 48 of a dataset with 40 samples, which has 44 samples now: ",
        ),
        (False, 3, 44, ""),  # it grows behind the position
    ],
)
@pytest.mark.at_most(2)
def test_a_dataset_of_another_length_is_another_place(
    ranks, tmp_path, shuffle, steps, length, words
):
    data = {"call": "runs.py:Tokens", "shuffle": shuffle}
    ranks(2).run(run, job(data=data, steps=steps), str(tmp_path))
    for result in ranks(2).run(
        look, job(data={**data, "args": {"length": length}}), str(tmp_path), {}
    ):
        assert words in result["error"]
        assert bool(result["error"]) == bool(words)
        assert not words or result["error"].endswith(
            f"init_from: {tmp_path}/checkpoints/step-{steps:08d}"
        )


def of_one_stream(raw: dict[str, Any]) -> None:
    """As ranks were saved while they had the model's stream only."""
    raw["rng"] = {name: raw["rng"][name] for name in ("python", "numpy")}


@pytest.mark.thorough
def test_a_checkpoint_of_before_there_were_three_streams_goes_on(ranks, tmp_path):
    keys = job(data={"call": "runs.py:Augmented", "shuffle": True})
    whole = ranks(2).run(run, keys, str(tmp_path / "whole"))
    ranks(2).run(run, keys, str(tmp_path / "cut"), None, 4)
    for rank in range(2):
        forge_record(tmp_path / "cut" / "checkpoints" / "step-00000003", rank, of_one_stream)
    rest = ranks(2).run(run, keys, str(tmp_path / "cut"), {})
    assert min(losses(rest[0])) == 4
    assert [each["digest"] for each in rest] == [each["digest"] for each in whole]


def damage(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(-9, os.SEEK_END)
        byte = file.read(1)
        file.seek(-9, os.SEEK_END)
        file.write(bytes([byte[0] ^ 4]))


def test_a_damaged_step_is_skipped_by_all_ranks_and_its_number_is_free_again(ranks, tmp_path):
    whole = ranks(2).run(run, job(), str(tmp_path / "whole"))
    ranks(2).run(run, job(), str(tmp_path / "cut"), None, 7)
    folder = tmp_path / "cut" / "checkpoints"
    damage(folder / "step-00000006" / "rank-00001.safetensors")
    rest = ranks(2).run(run, job(), str(tmp_path / "cut"), {})
    assert losses(rest[0]).keys() == {4, 5, 6, 7, 8}
    assert [each["digest"] for each in rest] == [each["digest"] for each in whole]
    notes = next(event["notes"] for event in rest[0]["events"] if event["type"] == "start")
    assert any(
        "step 6 is skipped" in note and "rank-00001.safetensors is damaged" in note
        for note in notes
    )
    assert (folder / "step-00000006" / "manifest.json").exists()


@pytest.mark.thorough
def test_a_folder_by_another_name_is_still_the_runs_own(ranks, tmp_path):
    """Its damaged steps give their numbers back, and what it goes on from is not saved again."""
    ranks(2).run(run, job(), str(tmp_path / "run"), None, 7)
    damage(tmp_path / "run" / "checkpoints" / "step-00000006" / "rank-00001.safetensors")
    (tmp_path / "link").symlink_to(tmp_path / "run")
    keys = {**job(), "steps": 3}
    found = ranks(2).run(
        run, keys, str(tmp_path / "run"), {"folder": str(tmp_path / "link" / "checkpoints")}
    )
    assert [each["error"] for each in found] == ["", ""]
    found = ranks(2).run(
        run, job(), str(tmp_path / "run"), {"folder": str(tmp_path / "link" / "checkpoints")}
    )
    assert [each["error"] for each in found] == ["", ""]
    assert losses(found[0]).keys() == {4, 5, 6, 7, 8}


def run_saving_the_beginning(keys: dict[str, Any], run_dir: str) -> dict[str, Any]:
    """As `run`, with a save before the first step."""
    train = Trainer.run

    def save_and_train(trainer: Trainer) -> None:
        assert trainer.checkpointer is not None
        trainer.checkpointer.save(0, trainer._state_to_save, "due")
        train(trainer)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "run", save_and_train)
        return run(keys, run_dir)


@pytest.mark.parametrize(
    "keys",
    [
        *(
            {"zero": stage, "precision": precision}
            for stage in range(4)
            for precision in ("fp32", "bf16")
        ),
        {"zero": {"stage": 2, "shard_group": 1}},  # each rank is a group of its own
        {"sync": "server"},
        {"optim": {"name": "lamb", "lr": 1e-2}},
        {"optim": {"name": "adagrad", "lr": 1e-2}},
    ],
    ids=str,
)
@pytest.mark.at_most(2)
def test_nothing_is_left_of_a_rejected_step_in_one_where_nothing_was_updated(ranks, tmp_path, keys):
    """The newest is damaged where a rank reads last, so that most of it is there when it is
    rejected.
    """
    keys = job(**{"steps": 1, "lr": "constant", "checkpoint": {"every": 1}, **keys})
    ranks(2).run(run_saving_the_beginning, keys, str(tmp_path / "run"))
    damage(tmp_path / "run" / "checkpoints" / "step-00000001" / "rank-00001.safetensors")
    fresh = ranks(2).run(look, keys, str(tmp_path / "fresh"), None)
    found = ranks(2).run(look, keys, str(tmp_path / "run"), {})
    assert [each["step"] for each in found] == [0, 0]
    assert [each["digest"] for each in found] == [each["digest"] for each in fresh]


def test_a_named_step_that_is_damaged_is_an_error(ranks, tmp_path):
    ranks(2).run(run, job(), str(tmp_path))
    damage(tmp_path / "checkpoints" / "step-00000006" / "rank-00000.safetensors")
    for result in ranks(2).run(look, job(), str(tmp_path), {"step": 6}):
        assert result["error"].startswith("CheckpointError: ")
        assert "does not hold step 6\n  step 6: " in result["error"]


def evaluations(result: dict[str, Any]) -> list[tuple[int, float]]:
    return [(event["step"], event["loss"]) for event in result["events"] if event["type"] == "eval"]


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.at_most(1)
def test_an_evaluation_that_a_signal_cuts_off_is_made_anew(ranks, tmp_path, stage):
    """Its samples draw random numbers, and none of those with which training goes on."""
    held_out = {"data": {"call": "runs.py:Augmented", "args": {"length": 12}}, "every": 2}
    keys = job(zero=stage, steps=6, eval=held_out, checkpoint={"every": 100})
    whole = ranks(2).run(run, keys, str(tmp_path / "whole"))
    cut = ranks(2).run(
        run, keys, str(tmp_path / "cut"), None, None, 6 + 3
    )  # the third batch of the second one
    rest = ranks(2).run(run, keys, str(tmp_path / "cut"), {})
    assert [each["error"] for each in cut] == ["StoppedError: stopped after step 4, saved"] * 2
    assert [step for step, _ in evaluations(cut[0])] == [2]
    assert evaluations(cut[0]) + evaluations(rest[0]) == evaluations(whole[0])
    assert len(evaluations(whole[0])) == 3
    assert {**losses(cut[0]), **losses(rest[0])} == losses(whole[0])
    assert [each["digest"] for each in rest] == [each["digest"] for each in whole]
    alone = ranks(2).run(run, {**keys, "eval": None}, str(tmp_path / "alone"))
    assert losses(alone[0]) == losses(whole[0])


def test_a_signal_in_the_last_evaluation_finds_the_run_saved(ranks, tmp_path):
    keys = job(steps=4, eval={"data": "runs.py:Tokens"}, checkpoint={"every": 100})
    found = ranks(2).run(run, keys, str(tmp_path / "run"), None, None, 2)
    assert [each["error"] for each in found] == ["StoppedError: stopped after step 4, saved"] * 2
    assert [(e["step"], e["reason"]) for e in found[0]["events"] if e["type"] == "save"] == [
        (4, "end")
    ]
    assert evaluations(found[0]) == []


def warnings(results: list[dict[str, Any]]) -> list[str]:
    return [event["message"] for event in results[0]["events"] if event["type"] == "warning"]


@pytest.mark.thorough
def test_other_data_is_told_and_goes_on(ranks, tmp_path):
    source = {"folder": f"{tmp_path}/first/checkpoints"}
    ranks(2).run(run, job(steps=3), str(tmp_path / "first"))

    def resumed(name: str, **keys: Any) -> list[str]:
        there = ranks(2).run(run, job(steps=4, **keys), str(tmp_path / name), source)
        assert losses(there[0]).keys() == {4}
        return warnings(there)

    shuffled = {"call": "runs.py:Tokens", "shuffle": True}
    assert resumed("same") == []
    assert resumed("workers", data={**shuffled, "workers": 1}) == []
    assert resumed("drawn", data={**shuffled, "call": "runs.py:Augmented"}) == []
    (told,) = resumed("other", data={**shuffled, "args": {"seed": 5}})
    assert told.startswith(f"the data is not that of {tmp_path}/first/checkpoints/step-00000003: ")
    assert "samples 0, 20 and 39 have changed; the run goes on at sample 24" in told
    (told,) = resumed("in order", data="runs.py:Tokens")
    assert ": data.shuffle was true and is false; " in told
    (told,) = resumed("seed", seed=4)
    assert ": seed, which the order follows, was 3 and is 4; " in told
