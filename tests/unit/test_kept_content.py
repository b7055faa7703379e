"""What forwards write to attributes is put back, to any depth."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

from zrun_core.errors import JobError
from zrun_core.user_code import kept_content
from zrun_core.user_code.trial import Attributes, kept_attributes


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
    with patch.object(kept_content, "_MOST_BYTES", 16):
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
