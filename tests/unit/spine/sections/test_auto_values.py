"""What sections leave to `auto`, and what they make of it."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin

import pytest

from zrun_core.errors import ExitCode, JobError
from zrun_core.spine.config import JobConfig
from zrun_core.spine.sections.auto_values import AutoValue
from zrun_core.spine.sections.data import BatchConfig
from zrun_core.spine.sections.section import Section
from zrun_core.spine.spec import BatchPlan

# Keys that sections cannot resolve, by who does.
ELSEWHERE = {
    "slots": "hosts, in zrun/placement",
    "device": "hosts, in zrun/placement",
    "threads": "hosts, in zrun/placement",
    "bind": "hosts, in zrun/placement",
    "launch.backend": "the environment, in zrun/hosts",
    "offload.fraction": "an estimate, in zrun/estimate",
    "parallel.split": "the model, in zrun_core/train",
    "parallel.plan": "the model, in zrun_core/train",
}
# What a job needs beside an `auto`, to have anything to resolve.
BESIDE: dict[str, dict[str, Any]] = {
    "batch.global": {"batch": {"micro": 2}},
    "batch.micro": {"batch": {"global": 8}},
    "lr.decay_steps": {"lr": {"schedule": "cosine"}},
    "offload.fraction": {"offload": {"optimizer": "host"}},
}


def job(**keys: Any) -> JobConfig:
    base = {"name": "t", "model": "m:f", "data": "m:d", "batch": {"micro": 1}}
    length = {} if {"tokens", "epochs"} & keys.keys() else {"steps": 50}
    return JobConfig.model_validate(base | length | keys)


def resolve(
    num_ranks: int = 1, device: Literal["cpu", "cuda"] = "cpu", **keys: Any
) -> tuple[JobConfig, list[str]]:
    """The job on so many ranks, and its reasons as `key value (why)`."""
    asked = job(**keys)
    found, reasons = asked.resolve(asked.launch_facts(device, num_ranks))
    return found, [f"{each.key} {each.value} ({each.why})" for each in reasons]


def refusal(num_ranks: int, **keys: Any) -> str:
    with pytest.raises(JobError) as caught:
        resolve(num_ranks, **keys)
    assert caught.value.exit_code is ExitCode.USAGE
    return str(caught.value)


# All of them


def types_in(annotation: Any) -> Iterator[Any]:
    """Every type and literal that an annotation is made of."""
    if get_origin(annotation) is None:
        yield annotation
    for part in get_args(annotation):
        yield from types_in(part)


def takes_auto(section: type[Section], path: tuple[str, ...] = ()) -> Iterator[str]:
    for name, field in section.model_fields.items():
        here = (*path, field.alias or name)
        for part in types_in(field.annotation):
            if part == "auto":
                yield ".".join(here)
            elif isinstance(part, type) and issubclass(part, Section):
                yield from takes_auto(part, here)


def with_auto(key: str) -> dict[str, Any]:
    keys: dict[str, Any] = {name: dict(value) for name, value in BESIDE.get(key, {}).items()}
    *sections, last = key.split(".")
    inner = keys
    for name in sections:
        inner = inner.setdefault(name, {})
    inner[last] = "auto"
    return keys


def test_the_walk_sees_keys() -> None:
    found = set(takes_auto(JobConfig))
    assert found >= {*ELSEWHERE, "batch.micro", "parallel.dp", "zero.bucket", "lr.decay_steps"}
    assert "bind" in found


@pytest.mark.parametrize("key", sorted(set(takes_auto(JobConfig))))
def test_each_auto_is_resolved_by_its_section_or_by_who_can(key: str) -> None:
    """A key that fails here has no line in `resolve` of its section."""
    found, _ = resolve(4, **with_auto(key))
    value: Any = found.model_dump(by_alias=True)
    for name in key.split("."):
        value = value[name]
    assert (value == "auto") == (key in ELSEWHERE)


def test_reasons_come_in_the_order_in_which_a_launch_prints_them() -> None:
    keys = {"batch": 16, "zero": 2, "lr": "cosine", "optim": "adam", "parallel": {"tp": 2}}
    assert resolve(8, "cuda", **keys)[1] == [
        "parallel.dp 4 (8 ranks / (tp 2 x pp 1))",
        "batch.micro 4 (global 16 / 4 ranks, no accumulation)",
        "zero.bucket 64.0 MiB (on cuda)",
        "lr.decay_steps 50 (the run's steps)",
        "optim.betas [0.9, 0.999] (adam's own)",
        "optim.eps 1e-08 (adam's own)",
    ]


def test_what_is_resolved_resolves_to_itself() -> None:
    asked = job(batch=16, zero=2, lr="wsd", optim="lamb", parallel={"tp": 2})
    facts = asked.launch_facts("cuda", 8)
    once, reasons = asked.resolve(facts)
    again, none = once.resolve(facts)
    assert len(reasons) == 6
    assert (again, none) == (once, ())


def test_sections_that_nobody_gave_are_not_given_to_ranks() -> None:
    """A rank asks which keys were given, as of an optimizer's arguments."""
    found, _ = resolve(2, activations="full")
    given = found.model_dump(by_alias=True, exclude_unset=True)
    assert given["activations"] == {"checkpoint": "full"}
    assert given["zero"] == {"bucket": 12 << 20}
    assert not {"precision", "offload", "guards", "launch", "log"} & given.keys()


# parallel


@pytest.mark.parametrize(
    ("parallel", "words"),
    [
        (
            {"tp": 3},
            "parallel: tp 3 x pp 1 = 3 ranks do not divide the 8 ranks of the hosts: write "
            "divisors, or slots that give a multiple of 3",
        ),
        (
            {"tp": 2, "dp": 2},
            "parallel: tp 2 x pp 1 x dp 2 = 4 ranks, but the hosts have 8 slots: write dp: auto, "
            "or slots that give 4",
        ),
    ],
)
def test_axes_that_do_not_come_to_the_ranks(parallel: dict[str, int], words: str) -> None:
    assert refusal(8, parallel=parallel) == words


def test_replicas_are_explained_where_ranks_share_a_model() -> None:
    found, reasons = resolve(8, parallel={"tp": 2, "pp": 2})
    assert found.parallel.dp == 2
    assert reasons[0] == "parallel.dp 2 (8 ranks / (tp 2 x pp 2))"
    found, reasons = resolve(8)
    assert found.parallel.dp == 8
    assert not [reason for reason in reasons if reason.startswith("parallel")]


# batch


def splits(asked: Any, micro: Any, ranks: int) -> set[tuple[int, int]]:
    """Every (global, micro) of whole micro-batches that are what was asked for."""
    most = asked if asked != "auto" else micro * ranks
    found = set()
    for size, times in itertools.product(range(1, most + 1), repeat=2):
        if asked in ("auto", size * times * ranks) and micro in ("auto", size):
            found.add((size * times * ranks, size, times))
    if "auto" in (asked, micro):  # then each rank has one micro-batch
        return {(total, size) for total, size, times in found if times == 1}
    return {(total, size) for total, size, _ in found}


def test_batches_are_those_that_trying_all_of_them_finds() -> None:
    sizes: list[Any] = ["auto", *range(1, 13)]
    refused = 0
    for asked, micro, ranks in itertools.product(sizes, ["auto", 1, 2, 3, 4], [1, 2, 3, 4]):
        if asked == micro == "auto":
            continue
        batch = {"global": asked, "micro": micro}
        wanted = splits(asked, micro, ranks)
        if not wanted:
            words = refusal(ranks, batch=batch)
            assert words.startswith(("batch.global: ", "batch.micro: "))
            refused += 1
            continue
        found = resolve(ranks, batch=batch)[0].batch
        assert {(found.global_, found.micro)} == wanted
        plan = BatchPlan.of(found, ranks)
        assert plan.micro * plan.accumulation * plan.ranks == plan.global_size == found.global_
    assert refused > 100


@pytest.mark.parametrize(
    ("batch", "ranks"),
    [
        ({"global": 24}, 5),
        ({"global": 3}, 5),
        ({"global": 24, "micro": 5}, 2),
        ({"global": 4, "micro": 3}, 4),
    ],
)
def test_a_batch_that_is_advised_is_one(batch: dict[str, int], ranks: int) -> None:
    words = refusal(ranks, batch=batch).rpartition("write ")[2]
    advised = re.findall(r"(micro: |global: |)(\d+)", words)
    assert advised
    for key, number in advised:
        resolve(ranks, batch=batch | {key.removesuffix(": ") or "global": int(number)})


def test_a_step_of_more_micro_batches_than_a_rank_can_keep() -> None:
    words = refusal(2, batch={"global": 200_002, "micro": 1})
    assert "= 100001 forward passes for one step" in words
    assert resolve(2, batch={"global": 200_000, "micro": 1})[0].batch.global_ == 200_000


def test_batches_are_explained() -> None:
    assert "batch.global 12 (micro 1 x 12 ranks)" in resolve(12)[1]
    assert "batch.micro 5 (global 5 / 1 rank, no accumulation)" in resolve(1, batch=5)[1]


# zero


def test_units_are_smaller_where_bandwidth_is_the_processor_s() -> None:
    for device, size in (("cpu", 12 << 20), ("cuda", 64 << 20)):
        assert resolve(2, device, zero=3)[0].zero.bucket == size
        found, reasons = resolve(2, device, zero={"stage": 3, "bucket": "1MiB"})
        assert found.zero.bucket == 1 << 20
        assert not [reason for reason in reasons if reason.startswith("zero")]


# lr


@pytest.mark.parametrize(
    ("schedule", "steps", "why"),
    [
        ("linear", 50, "the run's steps"),
        ("cosine", 50, "the run's steps"),
        ("polynomial", 50, "the run's steps"),
        ("wsd", 10, "a fifth of the run"),
        ("constant", "auto", None),
        ("inverse_sqrt", "auto", None),
        ("m:mine", "auto", None),
    ],
)
def test_a_decay_takes_the_run_or_the_end_of_it(
    schedule: str, steps: int | str, why: str | None
) -> None:
    found, reasons = resolve(lr=schedule)
    assert found.lr.decay_steps == steps
    told = [reason for reason in reasons if reason.startswith("lr")]
    assert told == ([f"lr.decay_steps {steps} ({why})"] if why else [])
    given, reasons = resolve(lr={"schedule": schedule, "decay_steps": 7})
    assert given.lr.decay_steps == 7
    assert not [reason for reason in reasons if reason.startswith("lr")]


@pytest.mark.parametrize("lr", ["cosine", "wsd", {"schedule": "wsd", "decay_steps": 3}])
def test_where_epochs_end_is_known_by_the_data(lr: Any) -> None:
    found, reasons = resolve(epochs=2, lr=lr)
    if isinstance(lr, str):
        assert found.lr.decay_steps == "auto"
        what = "a fifth of the run" if lr == "wsd" else "the steps of the run"
        why = f"{what}, known once the data is open: epochs 2"
        assert f"lr.decay_steps auto ({why})" in reasons
    else:
        assert found.lr.decay_steps == 3


def test_a_decay_whose_end_nobody_knows_stays_open() -> None:
    """Whoever trains refuses it; an estimate needs none."""
    found, reasons = resolve(tokens=1000, lr="cosine")
    assert found.lr.decay_steps == "auto"
    assert not [reason for reason in reasons if reason.startswith("lr")]


# optim


def test_hyper_parameters_that_are_left_to_the_optimizer_are_told() -> None:
    asked = job(optim={"name": "LAMB", "betas": [0.9, 0.95]})
    found, reasons = asked.optim.resolve(asked.launch_facts("cpu", 1))
    assert reasons == (AutoValue("optim.eps", "1e-06", "lamb's own"),)
    assert (found.betas, found.eps) == ((0.9, 0.95), 1e-6)
    assert resolve(optim="sgd")[0].optim.betas is None


@pytest.mark.parametrize("micro", ["auto", 1, 2, 3])
@pytest.mark.parametrize(("size", "ranks"), [(7, 8), (24, 5), (8, 3), (100, 7)])
def test_what_is_proposed_for_a_batch_that_does_not_divide_is_taken(
    size: int, ranks: int, micro: int | str
) -> None:
    with pytest.raises(JobError, match="samples do not divide over") as error:
        BatchConfig.model_validate({"global": size, "micro": micro}).over(ranks)
    proposed = re.findall(r"\d+", str(error.value).partition("write ")[2])
    assert proposed
    for each in map(int, proposed):
        found = BatchConfig.model_validate({"global": each, "micro": micro}).over(ranks)
        assert found.global_ == each
