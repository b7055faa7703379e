"""The user's functions beside the loop: when they are called, with what, what they may ask for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from runs import job, losses, run

from zrun.runs.start_point import choose_start
from zrun_core.checkpoint.folder import read_step
from zrun_core.spine.config import JobConfig

HOOKS = ("on_start", "on_step", "on_eval", "on_save", "on_end")


def noted(*names: str, **stop: list[int]) -> dict[str, Any]:
    """`hooks` of a job: all write down what they see; `stop` says where each asks for the end."""
    args = {name: {"hook": name, "stop": stop.get(name)} for name in names or HOOKS}
    return {name: {"call": "watching.py:note", "args": each} for name, each in args.items()}


def seen(run_dir: Path, rank: int) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / f"seen-{rank}.jsonl").read_text().splitlines()]


def of_type(found: dict[str, Any], kind: str) -> list[dict[str, Any]]:
    return [event for event in found["events"] if event["type"] == kind]


@pytest.mark.parametrize("in_background", [False, True])
def test_every_hook_is_called_on_every_rank_and_told_what_is_known(ranks, tmp_path, in_background):
    keys = job(
        steps=4,
        hooks=noted(),
        eval={"data": "runs.py:Tokens", "every": 2},
        checkpoint={"every": 2, "async": in_background},
    )
    found = ranks(2).run(run, keys, str(tmp_path))
    both = [seen(tmp_path, rank) for rank in (0, 1)]
    calls = [(each["hook"], each["step"]) for each in both[0]]
    assert [(each["hook"], each["step"]) for each in both[1]] == calls
    in_turn = [("on_start", 0), ("on_step", 1), ("on_step", 2), ("on_eval", 2), ("on_save", 2)]
    in_turn += [("on_step", 3), ("on_step", 4), ("on_eval", 4), ("on_save", 4), ("on_end", 4)]
    assert sorted(calls) == sorted(in_turn)
    assert in_background or calls == in_turn
    steps = {event["step"]: event for event in of_type(found[0], "step")}
    for rank, each in [(0, call) for call in both[0]] + [(1, call) for call in both[1]]:
        assert (each["rank"], each["world_size"], each["is_main"]) == (rank, 2, rank == 0)
        assert each["mean"] == 0.75
        assert each["saved"] == (f"step-{each['step']:08d}" if each["hook"] == "on_save" else None)
        assert each["reason"] == ("steps" if each["hook"] == "on_end" else "")
        if each["hook"] == "on_step":
            known = steps[each["step"]]
            assert [each[name] for name in ("loss", "lr", "grad_norm")] == [
                known[name] for name in ("loss", "lr", "grad_norm")
            ]
    assert both[0][0]["lr"] is both[0][0]["grad_norm"] is None
    evaluated = {event["step"]: event["loss"] for event in of_type(found[0], "eval")}
    assert {
        each["step"]: each["loss"] for each in both[1] if each["hook"] == "on_eval"
    } == evaluated
    assert both[1][-1]["metrics"] == {"loss": evaluated[4]}

    told = [
        (event["hook"], event["step"], event["values"]) for event in of_type(found[0], "metrics")
    ]
    assert told == [(*call, {"own": 10.0, "everyones": 0.75}) for call in calls]
    assert of_type(found[1], "metrics") == []
    assert of_type(found[0], "end")[0]["reason"] == "steps"


@pytest.mark.parametrize(
    ("hook", "asked", "last"), [("on_step", 3, 4), ("on_eval", 3, 3), ("on_save", 3, 4)]
)
@pytest.mark.at_most(1)
def test_one_rank_may_end_the_run_for_all(ranks, tmp_path, hook, asked, last):
    """It ends well, is saved, and is complete; going on from its step by number it trains on."""
    keys = job(eval={"data": "runs.py:Tokens", "every": 3}, checkpoint={"every": 3})
    stopping = {**keys, "hooks": noted("on_end", hook, **{hook: [asked, 1]})}
    whole = ranks(2).run(run, keys, str(tmp_path / "whole"))
    found = ranks(2).run(run, stopping, str(tmp_path / "cut"))
    assert [(each["error"], each["step"]) for each in found] == [("", last)] * 2
    (end,) = of_type(found[0], "end")
    why = f"hooks.{hook}: well enough"
    assert (end["reason"], end["why"], end["step"]) == ("hook", why, last)
    assert [seen(tmp_path / "cut", rank)[-1]["reason"] for rank in (0, 1)] == ["hook"] * 2
    assert of_type(found[0], "save")[-1]["step"] == last
    assert of_type(found[0], "eval")[-1]["step"] == last

    folder = tmp_path / "cut" / "checkpoints"
    assert read_step(folder / f"step-{last:08d}").progress["ended"] == f"hook: {why}"
    config = JobConfig.model_validate({**keys, "resume": str(folder)})
    beginning = choose_start(config, None, fresh=False)
    assert beginning.complete
    assert (
        f"it ended early: hook: {why}); to train longer from there, name the step: --resume {last}"
        in beginning.note
    )
    named = JobConfig.model_validate({**keys, "resume": str(folder / f"step-{last:08d}")})
    assert not choose_start(named, None, fresh=False).complete
    rest = ranks(2).run(run, keys, str(tmp_path / "cut"), {"step": last})
    assert {**losses(found[0]), **losses(rest[0])} == losses(whole[0])
    assert [each["digest"] for each in rest] == [each["digest"] for each in whole]
