"""One rank's build: the factory as it is, `init.

Meta` bit-equal between calls, and refused where it would be wrong.
"""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import cast

import numpy as np
import pytest
import torch
from torch import nn

from zrun_core.distributed.comm import Comm
from zrun_core.distributed.rng import mix
from zrun_core.distributed.transport import Group
from zrun_core.errors import JobError, PreflightError, UserCodeError
from zrun_core.models.bert import bert
from zrun_core.models.gpt import gpt
from zrun_core.models.mlp import mlp
from zrun_core.user_code import build
from zrun_core.user_code.build import Built, build_once_per_host, check, check_trained
from zrun_core.user_code.meta_init import build_on_meta
from zrun_core.user_code.user import user_code

ALONE = Group("host", (0,), 0, None)
CPU = torch.device("cpu")


def values(built: Built) -> dict[str, torch.Tensor]:
    found = {
        name: built.read(name, param).clone() for name, param in built.module.named_parameters()
    }
    return found | dict(built.module.named_buffers())


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(
        torch.equal(left[name], right[name]) for name in left
    )


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(2)
        )
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight


def test_one_rank_builds_as_a_plain_loop_does(tmp_path):
    torch.manual_seed(3)
    plain = Tied()
    built = build_once_per_host(Tied, 3, tmp_path / "init", ALONE, Comm(CPU))
    assert same(values(built), {**dict(plain.named_parameters()), **dict(plain.named_buffers())})
    assert built.module.head.weight is built.module.embed.weight
    assert not list(tmp_path.iterdir())


def frozen() -> nn.Module:
    return nn.Linear(2, 2).requires_grad_(requires_grad=False)


class Integers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.arange(3), requires_grad=False)


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        (nn.ReLU, "the model has no parameters: torch sees no modules"),
        (Integers, "parameter table is torch.int64"),
    ],
)
def test_what_cannot_be_trained_is_refused(factory, message, tmp_path):
    with pytest.raises(UserCodeError, match=message):
        build_once_per_host(factory, 0, tmp_path / "init", ALONE, Comm(CPU))
    with pytest.raises(UserCodeError, match=message):
        build_on_meta(factory, 0)


def test_a_frozen_model_is_built_and_not_trained():
    check(frozen())
    with pytest.raises(UserCodeError, match="nothing to train: none of its 2 parameters"):
        check_trained(frozen())


# init: meta


def test_meta_builds_are_bit_equal_between_calls_and_differ_between_seeds():
    first, again, other = (values(build_on_meta(Tied, seed)) for seed in (3, 3, 4))
    assert same(first, again)
    assert not torch.equal(first["embed.weight"], other["embed.weight"])
    assert not torch.equal(first["blocks.0.0.weight"], first["blocks.1.0.weight"]), (
        "each module has its own seed"
    )


def test_meta_values_do_not_depend_on_the_order_in_which_they_are_read():
    forwards, backwards = build_on_meta(Tied, 3), build_on_meta(Tied, 3)
    found = {}
    for name, param in reversed(list(backwards.module.named_parameters())):
        found[name] = backwards.read(name, param).clone()
    assert all(
        torch.equal(value, found[name]) for name, value in values(forwards).items() if name in found
    )


def test_meta_holds_no_parameter_and_leaves_the_generator_alone():
    built = build_on_meta(Tied, 3)
    assert all(param.is_meta for param in built.module.parameters())
    assert built.module.head.weight is built.module.embed.weight
    before = torch.get_rng_state()
    values(built)
    assert torch.equal(torch.get_rng_state(), before)


READ_ALL = """
import torch
from torch import nn
from zrun_core.spine.heap import keep_freed_memory
from zrun_core.user_code.meta_init import build_on_meta

def resident():
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * 4096

keep_freed_memory()
built = build_on_meta(lambda: nn.Sequential(*[nn.Linear(1024, 2048) for _ in range(24)]), 0)
lasting = []
before = highest = resident()
for name, param in built.module.named_parameters():
    built.read(name, param)
    lasting += [torch.zeros(8) for _ in range(100)]
    highest = max(highest, resident())
print(highest - before)
"""


@pytest.mark.thorough
def test_meta_values_leave_no_holes_behind():
    """24 modules of 8 MiB took 222 MiB in the heap, between small things that last."""
    command = [sys.executable, "-c", READ_ALL]
    found = subprocess.run(command, check=True, capture_output=True, text=True)
    assert int(found.stdout) < 96 << 20


def test_meta_values_have_the_modules_own_distribution():
    found = values(build_on_meta(lambda: nn.Linear(400, 300), 0))
    assert found["weight"].abs().max() == pytest.approx(1 / 20, rel=1e-3)
    buffers = values(build_on_meta(Tied, 3))
    assert torch.equal(buffers["blocks.0.1.running_var"], torch.ones(4))
    assert buffers["blocks.0.1.num_batches_tracked"] == 0


class Draws(nn.Module):
    """Draws its value from where a test says, and a number of torch."""

    def __init__(self, draw: Callable[[], float]) -> None:
        super().__init__()
        self.draw = draw
        self.drawn = nn.Parameter(torch.empty(3))
        self.of_torch = nn.Parameter(torch.empty(3))
        self.register_buffer("kept", torch.empty(2))

    def reset_parameters(self) -> None:
        with torch.no_grad():
            nn.init.normal_(self.of_torch)
            for owned in (self.drawn, self.kept):
                owned.copy_(torch.tensor([self.draw() for _ in owned]))


@pytest.mark.parametrize(
    "draw", [random.random, np.random.rand, lambda: random.gauss(0, 1), np.random.standard_normal]
)
def test_meta_makes_the_same_values_whatever_draws_them(draw: Callable[[], float]) -> None:
    def factory() -> nn.Module:
        return nn.Sequential(Draws(draw), Draws(draw))

    random.seed(1)
    np.random.seed(1)
    built = build_on_meta(factory, 3)
    first, second = values(built), values(built)
    assert same(first, second)
    draw()  # another rank has drawn more
    assert same(first, values(build_on_meta(factory, 3)))
    assert not same(first, values(build_on_meta(factory, 4)))
    assert not torch.equal(first["0.drawn"], first["1.drawn"]), "each module has its own"
    torch.manual_seed(mix(3, 1))  # the numbers of torch are those that it alone decides
    assert torch.equal(first["0.of_torch"], torch.randn(3))


def test_reading_values_of_meta_leaves_all_generators_where_they_were() -> None:
    built = build_on_meta(lambda: Draws(lambda: random.random() + np.random.rand()), 3)
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    expected = random.random(), np.random.rand(), torch.rand(())
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    values(built)
    assert (random.random(), np.random.rand(), torch.rand(())) == expected


class NoReset(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.gain = nn.Parameter(torch.ones(2))


class HalfReset(NoReset):
    """Its own parameter has the value that the constructor gave it."""

    def reset_parameters(self) -> None:
        pass


def writes(change: Callable[[nn.Linear], object]) -> Callable[[], nn.Module]:
    def factory() -> nn.Module:
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        with torch.no_grad():
            change(model[1])
        return model

    return factory


def given() -> nn.Module:
    model = nn.Linear(2, 2)
    model.weight = nn.Parameter(torch.ones(2, 2, device="cpu"))
    return model


def looks() -> nn.Module:
    model = nn.Linear(2, 2)
    with user_code("train.py:build failed"):
        float(model.weight.detach().sum())
    return model


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        (NoReset, r"the model \(NoReset\) has no reset_parameters, so gain would have no value"),
        (HalfReset, r"HalfReset.reset_parameters leaves gain unset"),
        (writes(lambda m: nn.init.normal_(m.weight)), r"normal_ on 1.weight"),
        (writes(lambda m: nn.init.xavier_uniform_(m.weight)), r"uniform_ on 1.weight"),
        (writes(lambda m: m.weight.mul_(2)), r"mul_ on 1.weight"),
        (writes(lambda m: m.weight.data.normal_(0, 0.02)), r"normal_ on 1.weight"),
        (writes(lambda m: m.weight.__setitem__(0, 1.0)), r"__setitem__ on 1.weight"),
        (writes(lambda m: m.bias[:1].fill_(1)), r"fill_ on 1.bias"),
        (writes(lambda m: m.load_state_dict(nn.Linear(2, 2).state_dict())), r"copy_ on 1.weight"),
        (given, "weight was given values by the factory"),
        (looks, "cannot run on the meta device"),
    ],
)
def test_meta_is_refused_where_it_would_be_wrong(factory, message):
    with pytest.raises(JobError, match=message) as caught:
        values(build_on_meta(factory, 0))
    assert "write init: factory" in str(caught.value)


def test_switching_gradients_off_is_no_change_of_values():
    def factory() -> nn.Module:
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        model[0].requires_grad_(requires_grad=False)
        return model

    built = build_on_meta(factory, 0)
    assert [param.requires_grad for param in built.module.parameters()] == [
        False,
        False,
        True,
        True,
    ]
    assert len(values(built)) == 4


def test_a_factory_is_read_lazily(tmp_path: Path):
    built = build_once_per_host(Tied, 3, tmp_path / "init", ALONE, Comm(CPU))
    with torch.no_grad():
        built.module.embed.weight.zero_()
    assert not values(built)["embed.weight"].any()


@pytest.mark.parametrize(
    "factory",
    [
        lambda: gpt(depth=2, dim=32, heads=2, seq_len=16),
        lambda: gpt("llama", depth=2, dim=32, heads=2, seq_len=16),
        lambda: bert(vocab_size=50, depth=2, dim=32, heads=2, seq_len=16),
        mlp,
    ],
)
def test_the_bundled_models_can_all_reset_themselves(factory):
    found = values(build_on_meta(factory, 0))
    assert all(torch.isfinite(value).all() for value in found.values())


def test_what_no_host_can_hold_is_refused_while_it_is_built(tmp_path: Path) -> None:
    built = []

    def factory() -> nn.Module:
        layers = nn.ModuleList()
        for _ in range(10):
            layers.append(nn.Linear(1000, 250, bias=False))  # 1 MB
            built.append(layers[-1])
        return layers

    def build_within(host_bytes: int | None) -> Built:
        built.clear()
        return build_once_per_host(
            factory, 3, tmp_path / "init", ALONE, Comm(CPU), host_bytes=host_bytes
        )

    for enough in (10_000_000, None):
        assert len(values(build_within(enough))) == 10
    with pytest.raises(
        PreflightError,
        match=r"take 3\.8 MiB and more as its factory builds them.*3\.8 MiB: write init: meta",
    ):
        build_within(3_999_999)
    assert len(built) == 3
    nn.Linear(1000, 10_000, bias=False)  # nobody counts any more


def test_only_parameters_that_are_kept_count(tmp_path: Path) -> None:
    def factory() -> nn.Module:
        for _ in range(5):
            nn.Linear(1000, 250, bias=False)
        kept = nn.Linear(1000, 250, bias=False)
        tied = nn.Linear(1000, 250, bias=False)
        tied.weight = kept.weight
        lazy = nn.LazyLinear(10)
        del lazy
        return nn.Sequential(kept, tied, nn.Linear(1000, 250, device="meta"))

    built = build_once_per_host(
        factory, 3, tmp_path / "init", ALONE, Comm(CPU), host_bytes=2_000_000
    )
    assert len(values(built)) == 3


def test_a_rank_that_refuses_the_host_waits_for_nobody() -> None:
    comm, host = (
        cast("Comm", None),
        Group("host", (0, 1), 1, None),
    )  # whoever asks the others fails here
    with pytest.raises(PreflightError), build._together(host, comm):
        raise PreflightError("no room")
