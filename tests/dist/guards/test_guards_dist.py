"""Numbers that go wrong on one rank: skipped by all and named; replicas that drift apart."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from axes_cells import states_apart
from runs import PoolWorker, job, make_spec, report, run, run_reading_late
from torch import nn
from toys import build, data, full_state, make_sharded, train_sharded, world

from zrun_core.data.order import EpochOrder
from zrun_core.data.samples import in_words
from zrun_core.distributed.named_vector import NamedVector
from zrun_core.errors import DivergedError
from zrun_core.guards.replicas import ReplicaGuard, device_digest, digest

PLACE = "blocks.1.up.weight"


def spoiled(stage: int, precision: str, kind: str, options: dict[str, Any]) -> dict[str, Any]:
    """Five steps; in the third and fourth a gradient or the loss of the last rank is not finite."""
    formats = {"compute": precision, "loss_scale": {"init": 1024.0}}
    sharded = make_sharded(build(), stage, precision=formats, **options)
    rank, size = world()
    skips, states, found = [], [], []
    for number, (x, y) in enumerate(data(5)):
        bad = number in (2, 3)
        sharded.begin_step()
        with sharded.forward() as micro:
            x, y = x.chunk(size)[rank], y.chunk(size)[rank]
            loss = sharded.module(x.to(sharded.settings.precision.compute), y)
        total = loss.item()
        param = dict(sharded.module.named_parameters())[PLACE]
        hook = None
        if bad and rank == size - 1:
            if kind == "loss":
                total = float("nan")
            elif kind == "large":
                hook = param.register_hook(lambda grad: grad.index_fill(0, torch.tensor([1]), 3e19))
            else:
                hook = param.register_hook(
                    lambda grad: grad.index_fill(0, torch.tensor([1]), float(kind))
                )
        sharded.backward(loss / size, micro, boundary=True)
        if hook is not None:
            hook.remove()
        sums = NamedVector.of(sharded.comm.device, loss=total / size)
        result = sharded.step(1e-2, sums, lambda sums: torch.ones(()).double())
        skips.append(bool(result.skipped))
        if skips[-1]:
            culprit = sharded.find_nonfinite([1.0, total])
            assert culprit is None or culprit.micro == (1 if culprit.loss else None)
            found.append(
                None
                if culprit is None
                else (culprit.parameter, culprit.kind, culprit.rank, culprit.loss)
            )
            if kind == "large":
                assert culprit.size == pytest.approx(3e19, rel=0.01)
        sharded.inspect_gradients(skips[-1])
        states.append({name: value.float().numpy() for name, value in full_state(sharded).items()})
    return {"skips": skips, "states": states, "found": found, "scale": float(sharded.scaler.scale)}


@pytest.mark.parametrize("kind", ["nan", "inf", "loss"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.at_most(2)
def test_all_ranks_skip_what_one_spoils_and_name_it(ranks, stage, kind, precision):
    runs = ranks(2).run(spoiled, stage, precision, kind, {})
    for found in runs:
        assert found["skips"] == [False, False, True, True, False]
        before, after = found["states"][1], found["states"][3]
        assert all((before[name] == after[name]).all() for name in before), (
            "a skipped step changed the parameters"
        )
        if kind == "loss":
            assert found["found"] == [(None, None, 1, "nan")] * 2
        else:
            # At first only the sum is known; then each rank looks at its own gradient.
            assert found["found"] == [(PLACE, kind, None, None), (PLACE, kind, 1, None)]
        # As torch.amp.GradScaler: every overflow halves it, and a loss that the gradient does not
        # show does not.
        halvings = 2 * (precision == "fp16" and kind != "loss")
        assert found["scale"] == (1024.0 if precision == "fp16" else 1.0) / 2**halvings
    for name, value in runs[0]["states"][-1].items():
        assert (value == runs[1]["states"][-1][name]).all()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_norm_that_overflows_is_named_by_the_largest_gradient(ranks, stage):
    for found in ranks(2).run(spoiled, stage, "bf16", "large", {}):
        assert found["skips"] == [False, False, True, True, False]
        assert found["found"] == [(PLACE, None, None, None)] * 2


@pytest.mark.parametrize("stage", [0, 3])
def test_a_parameter_that_is_not_finite_is_named(ranks, stage):
    for found in ranks(2).run(broken_parameter, stage):
        assert found == [None, (PLACE, "inf")]


def broken_parameter(stage: int) -> list[tuple[str, str] | None]:
    """What is found before and after the last element of one parameter is infinite."""
    sharded = make_sharded(build(), stage, precision={"compute": "fp16"})
    found = [sharded.find_nonfinite_parameter()]
    with sharded.gathered() as module:
        dict(module.named_parameters())[PLACE].view(-1)[-1] = float("inf")
    return [*found, sharded.find_nonfinite_parameter()]


class Normed(nn.Module):
    """BatchNorm, a codebook that writes through `.data`, and a table that nothing writes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.first, self.norm, self.last = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)
        self.register_buffer("seen", torch.zeros(8))
        self.register_buffer("table", torch.arange(8.0))
        self.register_buffer("nothing", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        self.seen.data.mul_(0.5).add_(x.detach().mean(0))
        return self.last(self.norm(x) + self.table).square().mean()


def running(stage: int, bad_steps: list[int]) -> list[tuple[bool, dict[str, torch.Tensor]]]:
    """By step: whether it was skipped, and the buffers after it.

    The bad ones read infinities on the last rank.
    """
    sharded = make_sharded(Normed(), stage)
    rank, size = world()
    found = []
    for step in range(4):
        sharded.begin_step()
        for number in range(2):
            torch.manual_seed(100 * rank + 10 * step + number)
            x = torch.randn(5, 6)
            if step in bad_steps and rank == size - 1:
                x[2, 3] = float("inf")
            with sharded.forward() as micro:
                loss = sharded.module(x)
            sharded.backward(loss / size, micro, boundary=number == 1)
        result = sharded.step(
            1e-2,
            NamedVector.of(sharded.comm.device, weight=1.0),
            lambda sums: torch.ones(()).double(),
        )
        buffers = {name: buffer.clone() for name, buffer in sharded.module.named_buffers()}
        found.append((bool(result.skipped), buffers))
    assert sharded.running._written is not None
    assert len(sharded.running._written) == 4, "the table is copied once, not in every step"
    return found


@pytest.mark.parametrize("bad_steps", [[0], [2], [1, 2]])
@pytest.mark.parametrize("stage", [0, 3])
def test_a_skipped_step_leaves_no_trace_in_running_statistics(ranks, stage, bad_steps):
    for found in ranks(2).run(running, stage, bad_steps):
        before = {name: buffer.clone() for name, buffer in Normed().named_buffers()}
        for step, (skipped, buffers) in enumerate(found):
            assert skipped == (step in bad_steps)
            for name, buffer in buffers.items():
                assert torch.isfinite(buffer).all()
                is_same = torch.equal(buffer, before[name])
                assert is_same == (skipped or name == "table"), (step, name)
            before = buffers


def test_a_hybrid_skips_together_too(ranks):
    for found in ranks(4).run(spoiled, 2, "bf16", "nan", {"shard_group": 2}):
        assert found["skips"] == [False, False, True, True, False]
        assert found["found"][1] == (PLACE, "nan", 3, None)


def starved(stage: int, accumulation: int, where: str) -> dict[str, Any]:
    """Five steps; in the third, memory of the last rank runs out in its first micro-batch."""
    sharded = make_sharded(build(), stage)
    rank, size = world()
    skips, states = [], []
    for number, (x, y) in enumerate(data(5)):
        sharded.begin_step()
        lost = 0
        for k in range(accumulation):
            part = [t.chunk(size)[rank].chunk(accumulation)[k] for t in (x, y)]
            broken = number == 2 and rank == size - 1 and k == 0
            boundary = k == accumulation - 1
            layer = sharded.module.blocks[1].up

            def fail(*_: Any) -> None:
                raise MemoryError

            hook = layer.register_forward_hook(fail) if broken and where == "forward" else None
            try:
                with sharded.forward() as micro:
                    hidden = sharded.module(*part)
                if broken and where == "backward":
                    hook = layer.weight.register_hook(fail)
                sharded.backward(hidden / size / accumulation, micro, boundary=boundary)
            except MemoryError:
                lost += 1
            if hook is not None:
                hook.remove()
            if broken:
                sharded.contribute_zeros(boundary=boundary)
        sums = NamedVector.of(sharded.comm.device, lost=lost)
        result = sharded.step(1e-2, sums, lambda sums: (sums["lost"] == 0).double())
        skips.append(bool(result.skipped))
        states.append({name: value.numpy() for name, value in full_state(sharded).items()})
    return {"skips": skips, "states": states}


def without_the_third(stage: int, accumulation: int) -> dict[str, Any]:
    """The same steps on batches that never had the third one."""
    sharded = make_sharded(build(), stage)
    batches = data(5)
    train_sharded(sharded, batches[:2] + batches[3:], accumulation=accumulation)
    return {name: value.numpy() for name, value in full_state(sharded).items()}


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize(("stage", "accumulation"), [(0, 1), (1, 1), (1, 2), (2, 2)])
@pytest.mark.at_most(2)
def test_a_batch_that_one_rank_cannot_hold_is_dropped_by_all(ranks, stage, accumulation, where):
    runs = ranks(2).run(starved, stage, accumulation, where)
    oracle = ranks(2).run(without_the_third, stage, accumulation)[0]
    for found in runs:
        assert found["skips"] == [False, False, True, False, False]
        for name, value in oracle.items():
            assert (found["states"][-1][name] == value).all(), name


def drifted(stage: int, options: dict[str, Any], what: str) -> list[str | None]:
    """Return the guard's words before and after a bit of one rank changes before the update."""
    sharded = make_sharded(build(), stage, **options)
    rank, size = world()
    guard, found = ReplicaGuard(sharded), []
    for number, (x, y) in enumerate(data(3)):
        sharded.begin_step()
        with sharded.forward() as micro:
            loss = sharded.module(
                x.chunk(size)[rank].to(sharded.settings.precision.compute), y.chunk(size)[rank]
            )
        sharded.backward(loss / size, micro, boundary=True)
        lr = 1e-2
        if number == 1 and rank == size - 1:
            unit = next(
                unit
                for unit in sharded.units
                if any(slot.name == PLACE for slot in unit.layout.slots)
            )
            if what == "lr":
                lr *= 1 + 2**-52
            elif what == "master":
                _flip(unit.master, unit.layout.numel - 3 if stage == 0 else 1)
            else:
                slot = next(slot for slot in unit.layout.slots if slot.name == PLACE)
                _flip(unit.param.full, slot.offset + 5)
        try:
            guard.check(number, {"step": number, "lr": lr})
            found.append(None)
        except DivergedError as error:
            found.append(str(error))
            break
        sharded.step(
            lr,
            NamedVector.of(sharded.comm.device, weight=1.0),
            lambda sums: torch.ones(()).double(),
        )
    guard_traffic = sum(
        sent for key, sent in sharded.comm.sent_bytes.items() if key.kind == "small"
    )
    assert guard_traffic < 1 << 16
    return found


def _flip(flat: torch.Tensor, place: int) -> None:
    """The lowest mantissa bit of one element."""
    bits = flat.view(torch.int32 if flat.dtype == torch.float32 else torch.int16)
    bits[place] ^= 1


@pytest.mark.parametrize(
    ("stage", "options", "what", "words"),
    [
        (0, {}, "parameter", f"rank 2 has another parameter {PLACE}"),
        (0, {"precision": "bf16"}, "parameter", f"rank 2 has another parameter {PLACE}"),
        (0, {"precision": "bf16"}, "master", "rank 2 has another fp32 master blocks.1."),
        (1, {}, "parameter", f"rank 2 has another parameter {PLACE}"),
        (2, {"precision": "bf16"}, "parameter", f"rank 2 has another parameter {PLACE}"),
        (3, {}, "lr", "rank 2 has lr 0.010000000000000002, rank 0 has 0.01"),
        (0, {}, "lr", "rank 2 has lr 0.010000000000000002, rank 0 has 0.01"),
    ],
)
@pytest.mark.at_most(4)
def test_one_bit_of_one_replica_is_found_with_its_rank_and_name(ranks, stage, options, what, words):
    for found in ranks(3).run(drifted, stage, options, what):
        assert found[0] is None
        assert f"step 1: replicas diverged: {words}" in found[1]


@pytest.mark.parametrize("stage", [1, 3])
def test_shards_are_compared_between_the_groups_of_a_hybrid(ranks, stage):
    options = {"precision": "bf16", "shard_group": 2}
    for found in ranks(4).run(drifted, stage, options, "master"):
        assert found[0] is None
        assert "replicas diverged: rank 3 has another fp32 master" in found[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "compute", [digest, lambda flat: int(device_digest(flat.view(torch.uint8)))]
)
def test_every_bit_and_the_order_count(dtype, compute):
    flat = torch.randn(37, generator=torch.Generator().manual_seed(1)).to(dtype)
    first = compute(flat)
    assert compute(flat.clone()) == first
    assert compute(flat[:-1]) != first
    swapped = flat.clone()
    swapped[[3, 4]] = flat[[4, 3]]
    assert compute(swapped) != first
    raw = flat.view(torch.uint8)
    for bit in range(8 * raw.numel()):
        raw[bit // 8] ^= 1 << bit % 8
        assert compute(flat) != first
        raw[bit // 8] ^= 1 << bit % 8


@pytest.mark.parametrize(
    ("fault", "guards", "step", "message"),
    [
        ("forward", {}, 1, "forward failed: out of memory: MemoryError"),
        (
            "forward",
            {"on_oom": "skip"},
            1,
            "forward failed: out of memory: MemoryError "
            "(guards.on_oom: skip does not drop this batch: the order of "
            "reductions is learnt in the first step)",
        ),
        ("update", {}, 1, "update failed: out of memory: MemoryError"),
        ("evaluation", {}, 1, "evaluation failed: out of memory: MemoryError"),
    ],
)
def test_wherever_memory_runs_out_the_holders_are_told(
    ranks, tmp_path, fault, guards, step, message
):
    model = {"call": "runs.py:Speaker", "args": {"dim": 512}}  # more than what a rank has left over
    evaluation = {"data": "runs.py:Tokens", "every": 1}
    keys = job(model=model, steps=2, lr="constant", guards=guards, eval=evaluation)
    note = ranks(1).run(report, keys, str(tmp_path), fault)[0]
    assert (note["type"], note["phase"], note["step"]) == ("OutOfMemoryError", fault, step)
    without_place = re.sub(
        r" failed(?: in \w+)? at \S+\.py:\d+, [^:]+: ", " failed: ", note["message"]
    )
    assert without_place == message
    told = note["traceback"].splitlines()
    assert told[0] == f"{note['message']}. What holds most:"
    assert "parameters, largest unit" in note["traceback"]
    assert "precision: bf16  # half the activations" in told[-1]


def test_the_third_batch_in_a_row_says_why_it_is_not_dropped(ranks, tmp_path):
    keys = job(
        steps=9, lr="constant", guards={"on_oom": "skip"}, hooks={"on_step": "runs.py:starve"}
    )
    note = ranks(1).run(report, keys, str(tmp_path), "none")[0]
    assert note["step"] == 5
    assert note["message"].endswith("those of the 2 steps before were, guards.max_nonfinite: 3)")


def test_what_looks_like_ctrl_c_in_a_hook_is_the_hooks_own(ranks, tmp_path):
    note = ranks(1).run(report, job(steps=2, lr="constant"), str(tmp_path), "hook")[0]
    assert (note["kind"], note["exit_code"], note["phase"]) == ("user", 5, "hook")
    assert note["message"] == "hook failed: KeyboardInterrupt"
    assert 'runs.py", line' in note["traceback"]


def with_other_data(keys: dict[str, Any], run_dir: str, what: str) -> list[str | None]:
    """What the guard says before and after the last rank follows another order than the others."""
    rank, size = world()
    worker = PoolWorker(make_spec(keys, run_dir, None), rank)
    trainer = worker.prepare()
    loader, found = trainer.loader, []
    for change in (False, True):
        if change and rank == size - 1:
            match what:
                case "order":
                    order = loader._source._order._permutation(0)
                    order[[3, 4]] = order[[4, 3]]
                case "position":
                    loader.cursor += 1
                case "length":
                    loader.num_samples += 1
        try:
            trainer.check_replicas(1e-2)
            found.append(None)
        except DivergedError as error:
            found.append(str(error))
    worker.close()
    return found


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("order", "rank 2 (host, cpu) has order of samples "),
        ("position", "rank 2 (host, cpu) has position in the data 1, rank 0 has 0;"),
        ("length", "rank 2 (host, cpu) has dataset length 41, rank 0 has 40;"),
    ],
)
def test_ranks_that_follow_another_order_of_samples_are_found(ranks, tmp_path, what, words):
    keys = job(checkpoint=None, lr="constant", batch={"global": 6})
    for before, after in ranks(3).run(with_other_data, keys, str(tmp_path), what):
        assert before is None
        assert words in after


def skips_told(found: dict[str, Any]) -> list[str]:
    told = [event["message"] for event in found["events"] if event["type"] == "warning"]
    return [text.partition(" on all ranks: ")[2] for text in told if "was skipped" in text]


@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.at_most(1)
def test_a_step_that_is_read_late_is_not_judged_by_the_gradient_of_the_next(ranks, tmp_path, stage):
    """Another parameter is spoiled in each step; of the first one only its unit is still known."""
    model = {"call": "runs.py:Spoiled", "args": {"passes": [3, 4, 5]}}
    keys = job(
        model=model,
        zero=stage,
        steps=9,
        lr="constant",
        batch={"global": 8, "micro": 4},
        checkpoint=None,
        hooks={},
    )
    late = ranks(2).run(run_reading_late, keys, str(tmp_path / "late"))
    at_once = ranks(2).run(run, keys, str(tmp_path / "at once"))
    order = EpochOrder(40, shuffle=True, seed=keys["seed"])
    indices = [order.index(position) for position in range(3 * 8 + 4, 3 * 8 + 8)]
    assert skips_told(at_once[0]) == [
        "the gradient of blocks.0.up.weight (layer blocks.0.up) is nan",
        "the gradient of blocks.1.up.weight (layer blocks.1.up) is nan on rank 1 "
        f"(indices {in_words(indices)} of the dataset)",
    ]
    assert skips_told(late[0]) == [
        "a gradient in blocks.0 is not finite",
        "the gradient of blocks.1.up.weight (layer blocks.1.up) is nan",
    ]
    for each in (*late, *at_once):
        assert (
            "step 5: 3 steps in a row were skipped: the gradient of blocks.1.down.weight"
            in each["error"]
        )
        assert " is nan on rank 1" in each["error"]


def test_a_single_bad_step_that_is_read_late_is_told_with_its_unit(ranks, tmp_path):
    model = {"call": "runs.py:Spoiled", "args": {"passes": [3]}}
    keys = job(
        model=model,
        zero=2,
        steps=6,
        lr="constant",
        batch={"global": 8, "micro": 4},
        checkpoint=None,
        hooks={},
    )
    late = ranks(2).run(run_reading_late, keys, str(tmp_path / "late"))
    assert [each["error"] for each in late] == [""] * 2
    assert skips_told(late[0]) == ["a gradient in blocks.0 is not finite"]


def with_delayed_updates(keys: dict[str, Any], run_dir: str) -> dict[str, Any]:
    with states_apart():
        return run(keys, run_dir)


def test_replicas_are_compared_while_an_update_is_delayed(ranks, tmp_path):
    """A rank that has only padding of a unit compares what the others do."""
    offload = {"optimizer": "host", "grad": "host", "schedule": "delayed", "delay_after": 2}
    keys = job(zero=1, offload=offload, guards={"replica_every": 2}, checkpoint=None, hooks={})
    for found in ranks(2).run(with_delayed_updates, keys, str(tmp_path)):
        assert found["error"] == ""
        assert found["step"] == 8
