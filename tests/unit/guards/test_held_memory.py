"""What holds memory when that runs out: counted, named, and with the line that it belongs to."""

from __future__ import annotations

import inspect
import json
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from zrun.estimate.forecast import Forecast
from zrun.launch.failures import Stopped, WorkerExit, first_failure
from zrun.launch.held import beside_plan, held_in_words
from zrun_core.distributed.comm import Comm
from zrun_core.distributed.mesh import Mesh
from zrun_core.guards.holders import CallsUnderWay, held_memory
from zrun_core.guards.kept_activations import kept_for_backward
from zrun_core.optim.resolve import resolve_optimizer
from zrun_core.spine.config import JobConfig
from zrun_core.spine.held_memory import Change, HeldMemory, Holder
from zrun_core.train.parallelize import make_settings
from zrun_core.user_code.places import called_at, made_at
from zrun_core.zero.sharded_model import ShardedModel

CPU = torch.device("cpu")
HERE = Path(__file__).name


class Mlp(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.up = nn.Linear(8, width)
        self.down = nn.Linear(width, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.nn.functional.gelu(self.up(x)))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 8)
        self.blocks = nn.ModuleList(Mlp() for _ in range(2))
        self.head = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.table(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def line_of(owner: Any, text: str) -> str:
    """The place of a line of this file, as errors name it."""
    lines, first = inspect.getsourcelines(owner)
    found = next(number for number, line in enumerate(lines) if text in line)
    return f"{HERE}:{first + found}, {lines[found].strip()}"


def test_what_waits_for_backward_belongs_to_the_module_that_needs_it():
    net = Net()
    result = net(torch.zeros(4, 3, dtype=torch.long))
    params = {param.untyped_storage().data_ptr() for param in net.parameters()}
    kept = kept_for_backward(net, "cpu", set(params))
    tokens = 4 * 3
    for block in range(2):
        # x, and what the linear and its GELU make of it.
        assert kept[f"blocks.{block}.up"] == 4 * tokens * (8 + 32)
        assert kept[f"blocks.{block}.down"] == 4 * tokens * 32
    assert kept["table"] == 8 * tokens, "the tokens"
    assert kept["head.0"] == 4 * tokens * (8 + 1 + 1), "its input, means, deviations"
    assert kept["head.1"] == 4 * tokens * 8
    result.sum().backward()
    del result
    assert not kept_for_backward(net, "cpu", set(params)), "backward has let go of all"


def test_nothing_is_recomputed_or_brought_back_to_be_counted():
    calls = []
    net = Net()
    net.blocks[0].register_forward_hook(lambda *_: calls.append(1))
    x = torch.randn(5, 8, requires_grad=True)
    result = checkpoint(net.blocks[0], x, use_reentrant=False)
    kept_for_backward(net, "cpu", set())
    assert calls == [1]
    assert result.shape == (5, 8)


def test_a_module_belongs_to_the_line_of_the_users_code_that_calls_and_makes_it():
    net = Net()
    for name, calls, makes in (
        ("blocks.1.up", (Mlp.forward, "self.up("), (Mlp.__init__, "self.up =")),
        ("blocks.0", (Net.forward, "in self.blocks"), (Net.__init__, "self.blocks =")),
        ("head.1", (Net.forward, "self.head("), (Net.__init__, "self.head =")),
        ("", (Net.forward, "def forward"), (Net.__init__, "def __init__")),
    ):
        assert called_at(net, name).endswith(line_of(*calls)), name
        assert made_at(net, name).endswith(line_of(*makes)), name
    assert called_at(nn.Sequential(nn.Linear(2, 2)), "0") == "", "no code of the user's"
    assert called_at(net, "gone.away") == called_at(net, ""), "a name of no module"


def sharded_net() -> ShardedModel:
    keys = {"name": "j", "model": "m:f", "data": "m:f", "steps": 9, "batch": 4, "zero": 0}
    config = JobConfig.model_validate(keys)
    chosen = resolve_optimizer(config.optim, lambda name: None, CPU)
    net = Net()
    return ShardedModel(
        net,
        lambda _, param: param.detach().clone(),
        make_settings(config, chosen, CPU),
        Mesh.build(0, ["host"], 1),
        Comm(CPU),
    )


class Cache:
    def __init__(self) -> None:
        self.kept = [torch.ones(1 << 22, dtype=torch.uint8) for _ in range(3)]


def test_all_that_a_rank_holds_is_counted_once():
    sharded = sharded_net()
    cache = Cache()
    held = held_memory([sharded], 3, CallsUnderWay(), 1000)
    assert held.rank == 3
    assert sum(held.by_kind.values()) == held.num_bytes
    params = sum(param.numel() for param in sharded.module.parameters())
    assert held.by_kind["params"] >= 4 * params
    assert held.by_kind["rest"] == 1000
    mine = next(each for each in held.holders if "(4194304,) uint8 (3 of them)" in each.name)
    assert (mine.num_bytes, mine.kind) == (3 << 22, "tensors")
    assert mine.name.endswith(" in a Cache")
    assert mine.place.endswith(line_of(Cache, "class Cache"))
    assert len(cache.kept) == 3


def test_a_tensor_of_a_call_under_way_is_named_by_the_call():
    sharded = sharded_net()

    def take() -> None:
        mine = torch.ones(1 << 22, dtype=torch.uint8)
        raise MemoryError(len(mine))

    with pytest.raises(MemoryError) as caught:
        take()
    held = held_memory([sharded], 0, CallsUnderWay.of_error(caught.value), 0)
    assert held.place.endswith(line_of(take, "raise"))
    assert any(", mine in " in each.name and ".take" in each.name for each in held.holders)


def test_calls_of_another_thread_are_seen_while_it_goes_on():
    begun, done = threading.Event(), threading.Event()

    def wait() -> None:
        begun.set()
        done.wait()

    thread = threading.Thread(target=wait)
    thread.start()
    begun.wait()
    assert thread.ident is not None
    try:
        place = CallsUnderWay.of_thread(thread.ident).place
    finally:
        done.set()
        thread.join()
    assert HERE in place
    assert CallsUnderWay.of_thread(-1) == CallsUnderWay()


HELD = HeldMemory(
    1,
    5 << 30,
    "train.py:31, x = self.up(x)",
    {"params": 1 << 30, "activations": 3 << 30, "rest": 1 << 30},
    (
        Holder("activations for the backward of up", "activations", 3 << 30, None, "t.py:3"),
        Holder("parameters", "params", 1 << 30, 1 << 30),
    ),
    (Change("batch.micro", "4", "activations halve", 3 << 29),),
)


def test_it_crosses_to_the_launcher_and_garbage_does_not():
    assert HeldMemory.from_json(json.dumps(HELD.to_json())) == HELD
    assert HeldMemory.of_data(HELD.to_json()) == HELD
    for garbage in ("", "{", "[]", "3", "null", '{"rank": 1}'):
        assert HeldMemory.from_json(garbage) is None
    half = {**HELD.to_json(), "holders": [{"name": 1}]}
    assert HeldMemory.of_data(half) is None


def test_the_words_name_holders_plans_lines_and_changes():
    assert held_in_words(HELD) == [
        "rank 1 held 5.0 GiB at train.py:31, x = self.up(x). What holds most:",
        "     3.0 GiB  activations for the backward of up (t.py:3)",
        "     1.0 GiB  parameters, planned 1.0 GiB",
        "What would help, in the job file, the cheapest first:",
        "  batch.micro: 4  # activations halve, about 1.5 GiB less here",
    ]


FORECAST = Forecast(
    "traced", 2 << 30, 2 << 30, 3 << 30, 8 << 30, 1.0, 0.5, 2.0, True, activation_bytes=1 << 30
)


def test_the_plan_is_set_beside_and_what_has_left_it_is_named():
    assert beside_plan(HELD, FORECAST) == [
        "The estimate (traced) expected 3.0 GiB in all, 2.0 GiB of it tensors:",
        "     1.0 GiB  parameters, gradients and optimizer states (this rank: 1.0 GiB)",
        "     1.0 GiB  activations, temporaries and other tensors (this rank: 3.0 GiB)",
        "     1.0 GiB  libraries and allocators (this rank: 1.0 GiB)",
        "Beyond that: 2.0 GiB of activations, temporaries and other tensors",
    ]
    as_planned = replace(HELD, by_kind={"params": 1 << 30, "activations": 1 << 30})
    assert not any("Beyond" in line for line in beside_plan(as_planned, FORECAST))
    assert beside_plan(None, FORECAST) == beside_plan(HELD, None) == []
    assert beside_plan(HELD, replace(FORECAST, activation_bytes=None)) == [], "of an older zrun"


def test_of_ranks_that_were_ended_together_the_fullest_is_told_of():
    small = replace(HELD, rank=0, num_bytes=1 << 20)
    ends = [
        WorkerExit(0, -9, 1.0, oom=True, held=small),
        WorkerExit(1, -9, 1.2, oom=True, held=HELD),
    ]
    found = first_failure(ends, ended=False)
    assert found is not None
    assert found.rank == 1


def test_a_run_that_saved_and_stopped_for_want_of_memory_says_what_held_it():
    stopped = Stopped(75, "a: too much", 4, 4, (), "a: too much", held=HELD)
    lines = stopped.describe("zrun train j", ["planned"]).splitlines()
    assert lines[0].startswith("rank 1 held 5.0 GiB")
    assert lines[-2:] == [
        "planned",
        "stopped after step 4, saved (a: too much); resume: zrun train j",
    ]
    assert stopped.to_json()["held"]["rank"] == 1
