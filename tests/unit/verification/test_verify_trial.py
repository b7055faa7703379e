"""What `zrun verify` makes of a job: a smaller model, few samples, the features to turn off."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from zrun.verification.bisect import Feature, bisect, features_of, with_slots
from zrun.verification.moved_and_held import moved_and_held
from zrun.verification.room import Place, PlainNeeds, why_too_large
from zrun.verification.shrink import shrunk
from zrun.verification.trial import check_method, other_layout, trial_of
from zrun_core.errors import JobError
from zrun_core.spine.config import JobConfig
from zrun_core.verification.verdict import Difference
from zrun_core.verification.where_to_look import WHERE


def job(**keys: Any) -> JobConfig:
    given = {
        "name": "small",
        "model": {"call": "m.py:build", "args": {"dim": 1024, "depth": 24, "heads": 16}},
        "data": "m.py:data",
        "steps": 1000,
        "batch": {"global": 64, "micro": 8},
    }
    return JobConfig.model_validate(given | keys)


@pytest.mark.parametrize(
    ("args", "tp", "blocks", "found"),
    [
        (
            {"dim": 1024, "depth": 24, "heads": 16},
            1,
            2,
            {("dim",): 64, ("depth",): 2, ("heads",): 1},
        ),
        ({"dim": 1024, "heads": 16}, 4, 2, {("dim",): 256, ("heads",): 4}),
        ({"depth": 24}, 1, 8, {("depth",): 8}),
        ({"depth": 2}, 1, 8, {}),
        ({"dim": 1023, "vocab_size": 50257}, 1, 2, {}),
        (
            {"config": {"hidden_size": 512, "num_hidden_layers": 12, "intermediate_size": 2048}},
            1,
            2,
            {
                ("config", "hidden_size"): 64,
                ("config", "num_hidden_layers"): 2,
                ("config", "intermediate_size"): 256,
            },
        ),
        ({"depth": True, "dropout": 0.1}, 1, 2, {}),
    ],
)
def test_a_model_shrinks_by_names(
    args: dict[str, Any], tp: int, blocks: int, found: dict[tuple[str, ...], int]
) -> None:
    assert shrunk(args, tp=tp, blocks=blocks) == found


def keys_of(overrides: Sequence[str]) -> dict[str, str]:
    return dict(each.split("=", 1) for each in overrides)


def test_two_replicas_on_cpus_where_there_are_no_gpus() -> None:
    trial = trial_of(job(parallel={"tp": 2}), steps=6, slots=None, gpus=0)
    keys = keys_of(trial.overrides)
    assert (keys["slots"], keys["device"], keys["parallel.dp"]) == ("4", "cpu", "2")
    assert (keys["batch.micro"], keys["batch.global"], keys["steps"]) == ("2", "8", "6")
    assert trial.told == "4 ranks on CPUs: tp 2, dp 2, pp 1, 6 steps of 8 samples"


def test_gpus_are_used_where_there_are_enough() -> None:
    keys = keys_of(trial_of(job(parallel={"tp": 2}), steps=6, slots=None, gpus=3).overrides)
    assert (keys["slots"], keys["device"], keys["parallel.dp"]) == ("2", "cuda", "1")
    keys = keys_of(trial_of(job(device="cpu"), steps=6, slots=None, gpus=8).overrides)
    assert keys["device"] == "cpu"


def test_a_pipeline_has_as_many_micro_batches_as_stages() -> None:
    keys = keys_of(trial_of(job(parallel={"pp": 4}), steps=6, slots=4, gpus=0).overrides)
    assert keys["batch.global"] == "8"


def test_ranks_make_up_whole_replicas() -> None:
    with pytest.raises(JobError, match=r"--slots 3: tp 2 x pp 1 need a multiple of 2"):
        trial_of(job(parallel={"tp": 2}), steps=6, slots=3, gpus=0)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"parallel": {"pp": 2, "schedule": "pipedream"}}, "older weights"),
        ({"offload": {"optimizer": "host", "schedule": "delayed"}}, "one step old"),
        ({"sync": "async_server", "staleness": "any"}, "of older parameters"),
    ],
)
def test_another_method_is_told(keys: dict[str, Any], words: str) -> None:
    with pytest.raises(JobError, match=words):
        check_method(job(**keys))


def test_the_other_layout_is_not_the_same() -> None:
    assert other_layout(job(slots=2, zero=3), "step")[1] == "1 rank at stage 0"
    assert other_layout(job(slots=1), "step")[1] == "2 ranks at stage 3"


def test_features_of_a_job_have_keys_that_turn_them_off() -> None:
    full = job(
        slots=8,
        compile=True,
        precision="bf16",
        zero=3,
        parallel={"tp": 2, "pp": 2, "dp": 2, "sequence": True, "schedule": "gpipe"},
        activations={"checkpoint": "full"},
        offload={"optimizer": "host"},
        optim={"clip": 1.0},
    )
    names = [feature.name for feature in features_of(full)]
    assert names == [
        "compile",
        "activations.checkpoint full",
        "offload",
        "parallel.sequence",
        "parallel.schedule gpipe",
        "parallel.pp 2",
        "parallel.tp 2",
        "2 data-parallel ranks",
        "zero 3",
        "precision bf16",
        "optim.clip",
        "optim adamw",
    ]
    assert features_of(job(optim={"name": "sgd"})) == []


def test_ranks_follow_from_what_is_turned_off() -> None:
    full = job(slots=8, parallel={"tp": 2, "pp": 2, "dp": 2})
    assert with_slots(["zero=0"], full) == ["zero=0", "slots=8"]
    assert with_slots(["parallel.pp=1", "parallel.tp=1"], full)[-1] == "slots=2"


def test_what_a_trial_leaves_out_is_told() -> None:
    trial = trial_of(job(zero={"stage": 3, "shard_group": 4}, steps=None, epochs=2), 6, None, 0)
    assert [note.partition(":")[0] for note in trial.notes] == [
        "zero.shard_group 4 does not divide 2 ranks, so it is all here",
        "steps replace epochs",
    ]
    assert (
        keys_of(trial_of(job(zero={"stage": 3, "shard_group": 2}), 6, None, 0).overrides)["slots"]
        == "4"
    )
    assert not trial_of(job(zero={"stage": 3, "persist_below": "1KiB"}), 6, None, 0).shrinks


FEATURES = [Feature(name, (f"{name}=off",)) for name in ("a", "b", "c")]


@pytest.mark.parametrize(
    ("needed", "words"),
    [
        ([{"b=off"}], "the cause is b: without it, results agree"),
        ([{"a=off"}, {"c=off"}], "the cause is a and c: without one of them, results agree"),
        ([{"a=off", "b=off"}], "no single feature is the cause: without a, b, results agree"),
        ([], "results differ without all of these too: look at the model, its loss and its data"),
    ],
)
def test_bisection(needed: list[set[str]], words: str) -> None:
    told: list[str] = []

    def agrees(keys: Sequence[str]) -> bool:
        return any(each <= set(keys) for each in needed)

    assert bisect(FEATURES, agrees, told.append) == words
    assert len(told) == 3


def told_at_the_end(folder: Path, **end: Any) -> list[str]:
    events = [{"type": "step", "time": 1.0}, {"type": "end", "time": 2.0, **end}]
    (folder / "events.jsonl").write_text("".join(f"{json.dumps(event)}\n" for event in events))
    found = moved_and_held(folder)
    assert found is not None
    return list(found.in_words)


def test_bytes_are_told_beside_those_that_were_planned(tmp_path: Path) -> None:
    traffic = {
        "all_gather": {"measured_bytes": 2048, "expected_bytes": 2048},
        "tensor": {"measured_bytes": 1024},  # nothing plans these
    }
    memory = {"measured_bytes": 4096, "planned_bytes": 4096}
    assert told_at_the_end(tmp_path, traffic=traffic, memory=memory) == [
        "rank 0 sent 3.0 KiB and held 4.0 KiB, to the byte as planned"
    ]
    traffic["all_gather"]["measured_bytes"] = 4096
    memory["planned_bytes"] = 5120
    assert told_at_the_end(tmp_path, traffic=traffic, memory=memory) == [
        "rank 0 sent in all_gather 4.0 KiB, and 2.0 KiB were planned",
        "rank 0 held 4.0 KiB, and 5.0 KiB were planned",
    ]
    (tmp_path / "events.jsonl").write_text("")
    assert moved_and_held(tmp_path) is None


def test_a_factory_without_usual_names_is_told() -> None:
    assert not trial_of(job(), steps=6, slots=None, gpus=0).stays
    model = {"call": "m.py:build", "args": {"size": "7b", "depth": True}}
    trial = trial_of(job(model=model), steps=6, slots=None, gpus=0)
    assert trial.shrinks == ()
    assert trial.stays.startswith("no argument of m.py:build has the usual name of a depth or a")
    tiled = trial_of(job(zero={"stage": 3, "tile": "1MiB"}), steps=6, slots=None, gpus=0)
    assert "zero.tile" in tiled.stays


GIB = 1 << 30


@pytest.mark.parametrize(
    ("optim", "host", "gpu", "words"),
    [
        ("adamw", 60 * GIB, None, ""),  # 4 x 2 of models, 44 of the rest, of each parameter
        ("adamw", 50 * GIB, None, "at least 52.0 GiB, more than the 50.0 GiB free: A; or write"),
        ("adamw", 46 * GIB, None, "at least 52.0 GiB, more than the 46.0 GiB free: A"),
        ("sgd", 40 * GIB, None, ""),
        ("lion", 40 * GIB, None, "at least 44.0 GiB, more than the 40.0 GiB free: A; or write"),
        ("adamw", 50 * GIB, 16 * GIB, ""),
        ("adamw", 50 * GIB, 10 * GIB, "at least 12.0 GiB, more than the 10.0 GiB of a GPU: A; or "),
        ("adamw", 40 * GIB, 16 * GIB, "at least 44.0 GiB, more than the 40.0 GiB free: A"),
    ],
)
def test_a_plain_loop_without_room_is_told_before_it_begins(
    optim: str, host: int, gpu: int | None, words: str
) -> None:
    config = job(optim={"name": optim})
    needs = PlainNeeds.of(config, GIB, GIB)
    on_device = None if gpu is None else Place(gpu, "of a GPU")
    told = why_too_large(needs, 2, 4, Place(host, "free"), on_device, ["A"])
    assert (words in told) if words else told == ""
    assert told.endswith("--slots 4") == ("; or " in words)


def test_each_difference_says_where_to_look() -> None:
    for what, fragment, where in WHERE:
        difference = Difference(1, what, "head.weight", 0.4, 1e-4, f"on it: {fragment}")
        assert difference.look_at == where
        assert difference.in_words.startswith("step 1: ")
        assert Difference(1, what, "", 0.4, 1e-4).look_at  # also where nothing is known


def test_the_page_says_where_to_look_too() -> None:
    page = (Path(__file__).parents[3] / "docs/verify.md").read_text()
    for what, fragment, where in WHERE:
        like = f"`\N{HORIZONTAL ELLIPSIS} {fragment} \N{HORIZONTAL ELLIPSIS}` " if fragment else ""
        assert f"| {what} | {like}| {where} |" in page


def test_the_page_names_tests_that_are_there() -> None:
    root = Path(__file__).parents[3]
    page = (root / "docs/verify.md").read_text()
    _, _, after = page.partition("## What zrun keeps right, and what it refuses")
    table = after.partition("\n## ")[0]
    named = set(re.findall(r"`(test_\w+)`", table))
    files = [path.read_text() for path in (root / "tests/dist").rglob("test_*.py")]
    assert len(named) > 10
    assert {name for name in named if not any(f"def {name}(" in text for text in files)} == set()
    told = (
        "computes something else than in the whole model",
        "which makes something else than the whole model",
        "which cannot be put back after a forward that is no part of training",
        "where a stage has those of its own blocks alone",
        "other than as its result",
        "of which each rank has a slice, and the first forward does not read it there",
    )
    source = [_literals(path.read_text()) for path in (root / "zrun_core").rglob("*.py")]
    for words in told:
        assert words in table
        assert any(words in text for text in source), words


def _literals(source: str) -> str:
    """Return source with neighbouring string literals joined."""
    return re.sub(r'"\s*\n\s*f?"', "", source)
