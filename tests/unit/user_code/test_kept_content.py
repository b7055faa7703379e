"""What forwards write to attributes is put back, to any depth."""

from __future__ import annotations

import itertools
import random
import threading
import weakref
from collections import OrderedDict, deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import nn

from zrun_core.errors import JobError
from zrun_core.user_code import kept_content, object_kinds
from zrun_core.user_code.trial import Attributes, kept_attributes, watched_state
from zrun_core.user_code.turns import OwnAttributes, Turns
from zrun_core.zero.wrap.fakes import kept_buffers


class Holder(nn.Module):
    def __init__(self, value: Any) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.value = value


def test_objects_are_put_back_and_stay_the_same() -> None:
    shared: list[Any] = [torch.zeros(2), {"n": 1}]
    cyclic: dict[str, Any] = {"list": shared}
    cyclic["itself"] = cyclic
    hidden = nn.BatchNorm1d(2)
    space = SimpleNamespace(a=shared, b=1, hidden=[hidden])
    order = OrderedDict(one=1, two=2)
    model = Holder((space, cyclic, order))
    with kept_attributes(model):
        shared[0].data.add_(1)
        shared[1]["n"] = 2
        shared.append(3)
        space.b, space.c = 2, 3
        order.move_to_end("one")
        cyclic["more"] = 1
        hidden(torch.ones(3, 2))
        model.new = 1
    assert not hasattr(model, "new")
    assert shared[0].tolist() == [0, 0]
    assert shared[1:] == [{"n": 1}]
    assert vars(space) == {"a": shared, "b": 1, "hidden": [hidden]}
    assert space.a is shared
    assert list(order) == ["one", "two"]
    assert list(cyclic) == ["list", "itself"]
    assert hidden.num_batches_tracked == 0  # of a module that is in a plain list


def test_parameters_are_left_alone() -> None:
    model = Holder(None)
    model.value = [model.linear.weight.data]
    with kept_attributes(model), torch.no_grad():
        model.linear.weight.fill_(7)
    assert model.linear.weight.eq(7).all()


def test_a_tensor_that_is_not_copied_is_named() -> None:
    model = Holder(torch.zeros(8))
    with patch.object(kept_content, "MOST_BYTES", 16):
        with kept_attributes(model):
            pass
        match = r"writes in place to Holder.value, a tensor of \[8\]"
        with pytest.raises(JobError, match=match), kept_attributes(model):
            model.value.add_(1)


def test_tensors_that_no_forward_writes_are_copied_no_more() -> None:
    model = Holder([torch.zeros(8)])
    attributes = Attributes(model.modules(), None)
    before = attributes.copy()
    attributes.leave_out_steady(before, attributes.changed(before))
    before = attributes.copy()
    model.value[0].add_(1)
    assert "value" in attributes.changed(before)[0]
    with pytest.raises(JobError, match=r"Holder.value"):
        attributes.put_back(before)


def numbers() -> Any:
    yield from range(9)


@pytest.mark.parametrize("value", [itertools.count(), iter([1, 2]), numbers(), map(str, [1, 2])])
def test_an_iterator_that_goes_on_is_named(value: Any) -> None:
    model = Holder([value])
    with kept_attributes(model):
        pass
    with pytest.raises(JobError, match="an iterator"), kept_attributes(model):
        next(value)


def parts_of(value: Any) -> list[Any]:
    """Return the objects of an attribute that are kept."""
    attributes = Attributes([model := Holder(value)], None)
    content = attributes.copy()[0]["value"][1]
    assert model.value is value
    return [part.value for part in content.parts] if content is not None else []


class Data(torch.utils.data.Dataset[int]):
    def __init__(self) -> None:
        self.samples = [[1]]


class Loader(torch.utils.data.DataLoader[int]):
    """One of the user's own."""


class Places(torch.utils.data.Sampler[int]):
    """A sampler of the user's own."""

    def __init__(self) -> None:
        self.places = [[1]]


class Prefetcher:
    def __init__(self) -> None:
        self.found: deque[int] = deque()
        self.thread = threading.Thread(target=self.found.append, args=(1,))


def trainer_of(package: str) -> Any:
    cls = type("Trainer", (), {"__module__": f"{package}.trainer"})
    own = type("Own", (cls,), {"__module__": __name__})()
    own.datamodule = [1]
    return own


def test_data_and_threads_are_left_out(tmp_path: Path) -> None:
    mapped = np.memmap(tmp_path / "tokens", dtype="u2", mode="w+", shape=(64,))
    assert parts_of(mapped) == parts_of(np.asarray(mapped)[3:]) == []
    for value in (Data(), Loader(Data()), Places(), Prefetcher(), threading.Thread()):
        assert parts_of(value) == []
    assert parts_of(trainer_of("pytorch_lightning")) == []
    assert parts_of(trainer_of("users_own")) != []


def test_a_threads_objects_are_not_rewound() -> None:
    model = Holder(Prefetcher())
    with kept_attributes(model):
        model.value.thread.start()
        model.value.thread.join()
    assert list(model.value.found) == [1]
    fed = Holder(deque())
    fed.thread = threading.Thread(target=fed.value.append, args=(1,))
    fed.calls = [0]
    with kept_attributes(fed):
        fed.thread.start()
        fed.thread.join()
        fed.calls[0] = 1
    assert list(fed.value) == [1]
    assert fed.calls == [0]


def test_arrays_count_and_large_ones_are_known_by_a_sum() -> None:
    model = Holder([np.zeros(8), np.zeros((8, 8)).T])
    small, large = model.value
    with patch.object(kept_content, "MOST_BYTES", 64):
        with kept_attributes(model):
            small[3] = 1
        assert not small.any()
        match = r"writes in place to Holder.value, an array of \[8, 8\] \(512 B\)"
        with pytest.raises(JobError, match=match), kept_attributes(model):
            large[3, 3] = 1
        with patch.object(object_kinds, "_MOST_READ", 256), kept_attributes(model):
            pass


@pytest.mark.parametrize("dtype", ["datetime64[s]", "U3", "c16", [("a", "i4"), ("b", "f8")]])
def test_arrays_of_any_kind_are_put_back(dtype: Any) -> None:
    array = np.zeros((2, 3), dtype)[:, ::2]
    model = Holder(array)
    with kept_attributes(model):
        array[0, 1] = np.ones((), dtype)
        assert array[0, 1] != np.zeros((), dtype)
    assert array[0, 1] == np.zeros((), dtype)


def test_of_many_objects_the_nearest_are_kept() -> None:
    data = [[0] for _ in range(100)]
    state = SimpleNamespace(data=data, n={"calls": 0})
    model = Holder(state)
    later = Holder({"calls": 0})
    model.later = later
    with patch.object(kept_content, "_MOST_OBJECTS", 10), kept_attributes(model):
        state.n["calls"] = later.value["calls"] = 1  # deeper than the data, and behind it
        data.append([1])
        data[99][0] = 1  # one of too many
    assert state.n == later.value == {"calls": 0}
    assert len(data) == 100
    assert data[99] == [1]


def test_a_list_of_too_many_items_may_not_change_its_length() -> None:
    model = Holder(list(range(9)))
    match = r"Holder.value, a list of 10 items"
    with patch.object(object_kinds, "_MOST_ITEMS", 8):
        with kept_attributes(model):
            pass
        with pytest.raises(JobError, match=match), kept_attributes(model):
            model.value.append(1)


def test_many_objects_that_no_forward_writes_are_gone_through_once() -> None:
    words = SimpleNamespace(merges=[[str(i)] for i in range(2000)], table=torch.zeros(2))
    model = Holder(words)
    model.same = [words]
    model.state = {"calls": 0}
    attributes = Attributes(model.modules(), None)
    before = attributes.copy()
    model.state["calls"] += 1
    attributes.leave_out_steady(before, attributes.changed(before))
    with patch.object(kept_content.Walk, "_part", autospec=True) as part:
        attributes.copy()
    assert len(part.call_args_list) <= 8
    before = attributes.copy()
    assert attributes.changed(before) == [{}, {}, {}]
    words.table.add_(1)
    model.state["calls"] += 1
    assert attributes.changed(before)[0].keys() == {"value", "state"}
    before = attributes.copy()
    words.merges.append(["new"])
    assert attributes.changed(before)[0].keys() == {"value"}
    model.value = SimpleNamespace(calls=0)
    before = attributes.copy()
    model.value.calls = 1
    attributes.put_back(before)
    assert model.value.calls == 0


class Slotted:
    __slots__ = ("a", "b")


class Hiding(Slotted):
    __slots__ = ()

    @property
    def a(self) -> int:  # type: ignore[override]
        raise RuntimeError("no")


class Gone:
    pass


def dead() -> Any:
    return weakref.proxy(Gone())


def test_what_cannot_be_read_is_not_kept_and_the_rest_is() -> None:
    hiding = Hiding()
    Slotted.a.__set__(hiding, 1)  # type: ignore[attr-defined]
    key = torch.zeros(3)
    cache = {key: 1}
    state = {"calls": 0}
    values = [random.SystemRandom(), dead(), cache, hiding, state]
    model = Holder(values)
    with kept_attributes(model):
        cache.clear()
        cache[torch.ones(3)] = 2
        hiding.b = 2
        Slotted.a.__set__(hiding, 2)  # type: ignore[attr-defined]
        state["calls"] = 1
    assert list(cache) == [key]
    assert Slotted.a.__get__(hiding) == 1  # type: ignore[attr-defined]
    assert not hasattr(hiding, "b")
    assert state == {"calls": 0}


@pytest.mark.parametrize(
    "dtype", [torch.float8_e4m3fn, torch.uint16, torch.bool, torch.complex64, torch.float32]
)
def test_tensors_of_any_kind_are_put_back(dtype: torch.dtype) -> None:
    one = torch.zeros(1).to(dtype)
    grid = torch.zeros(4, 2).to(dtype)
    model = Holder([one.expand(5), grid[:, 1], grid[:1, 0], one[0]])
    with kept_attributes(model):
        one.copy_(torch.ones(1).to(dtype))
        grid.copy_(torch.ones(4, 2).to(dtype))
    assert not one.view(torch.uint8).any()
    bits = grid.view(torch.uint8).view(4, 2, -1)
    assert not bits[:, 1].any()
    assert not bits[0].any()
    assert bits[1, 0].any()  # nobody holds it


def test_tensors_that_have_no_values_here_are_left_alone() -> None:
    model = Holder(None)

    def loss(x: torch.Tensor) -> torch.Tensor:
        model.value = [x]
        with kept_attributes(model):
            return x.square().sum()

    assert torch.equal(torch.func.grad(loss)(torch.ones(3)), 2 * torch.ones(3))
    packed = torch.zeros(4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    model.value = [packed, {"calls": 0}]
    with kept_attributes(model):
        model.value[1]["calls"] = 1
    assert model.value[1] == {"calls": 0}


def test_a_buffer_that_an_attribute_holds_too_is_a_buffer() -> None:
    model = Holder(None)
    model.register_buffer("n", torch.zeros(1))
    model.value = [model.n]
    for enters in (False, True):
        attributes = Attributes(model.modules(), None, enters_modules=enters)
        before = attributes.copy()
        model.n += 1
        assert not any(attributes.changed(before))


def test_turns_keep_nothing_of_the_first_step() -> None:
    model = Holder(torch.zeros(2))
    turns = Turns(Attributes(model.modules(), None), "key", "instead")
    with OwnAttributes(turns, 0).turn():
        model.last = torch.zeros(3)
    last = weakref.ref(model.last)
    turns.end_step()
    model.last = None
    assert turns.has_changed
    assert last() is None


class Counting(nn.Module):
    """It has a class variable, a buffer that is replaced, and one that cannot be written."""

    calls = 0

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(2))
        self.register_buffer("mask", torch.ones(1).expand(3))


def test_what_forwards_change_is_named_and_nothing_else_is() -> None:
    model = Counting()
    names_of_changed = watched_state(model, None)
    assert names_of_changed() == []  # a class variable, too, is what it was
    model.mean = torch.ones(2)
    assert names_of_changed() == ["mean"]
    model.seen = 1
    Counting.calls += 1
    assert names_of_changed() == ["Counting.seen", "a class variable", "mean"]


def test_buffers_are_put_back_that_were_replaced_or_cannot_be_written() -> None:
    model = Counting()
    mean, mask = model.mean, model.mask
    with kept_buffers(model):
        model.mean = torch.ones(2)
        mean.add_(5)
    assert model.mean is mean
    assert model.mask is mask
    assert mean.tolist() == [0, 0]


def test_class_variables_are_put_back() -> None:
    model = Counting()
    before = Counting.calls
    with kept_attributes(model):
        Counting.calls += 1
        Counting.new = 1
    assert Counting.calls == before
    assert not hasattr(Counting, "new")


def test_hooks_and_the_flag_that_they_are_there_are_put_back_together() -> None:
    """A forward that registers its hooks once, as those of transformers do."""

    class Noting(Holder):
        def forward(self, x: torch.Tensor) -> list[int]:
            if not self.value:
                self.linear.register_forward_hook(lambda *_: self.seen.append(1), always_call=True)
                self.value = True
            self.seen: list[int] = []
            self.linear(x)
            return self.seen

    model = Noting(False)
    earlier = model.linear.register_forward_pre_hook(lambda *_: earlier.remove())
    for _ in range(3):
        with kept_attributes(model):
            assert model(torch.zeros(2)) == [1]
    assert not model.linear._forward_hooks
    assert not model.linear._forward_hooks_always_called
    assert len(model.linear._forward_pre_hooks) == 1, "one that removes itself is there again"
    assert model(torch.zeros(2)) == [1]
    assert model(torch.zeros(2)) == [1]
    assert not model.linear._forward_pre_hooks
