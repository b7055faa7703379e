"""How far apart two runs are: losses, and what they would save."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from runs import losses

Found = list[dict[str, Any]]  # of each rank, what `runs.run` returns
Tensors = dict[tuple[str, str], np.ndarray[Any, Any]]


def whole(found: Found) -> Tensors:
    """Put together what all ranks would save; what two of them would is a failure."""
    pieces: dict[tuple[str, str], dict[int, Any]] = {}
    for of_rank in found:
        assert not of_rank["error"], of_rank["error"]
        for (tensor, state, start), values in of_rank["parts"].items():
            of_tensor = pieces.setdefault((tensor, state), {})
            assert start not in of_tensor, f"{tensor} {state} {start} is saved twice"
            of_tensor[start] = values
    return {
        key: np.concatenate([parts[start] for start in sorted(parts)])
        for key, parts in pieces.items()
    }


class Distance(NamedTuple):
    """How far apart two runs are, as shares of what they are apart from.

    Attributes:
        of_losses: the largest of a step.
        of_values: the largest of parameters and moments, of the largest value of the tensor.
    """

    of_losses: float
    of_values: float

    def is_within(self, close: float) -> bool:
        """Return whether losses are so close, and values within ten times that."""
        return self.of_losses <= close and self.of_values <= 10 * close


def distance(many: Found, one: Found) -> Distance:
    """Return how far a run is from another one of as many steps.

    Raises:
        AssertionError: they have other steps, tensors or skipped steps.
    """
    ours, theirs = losses(many[0]), losses(one[0])
    assert ours.keys() == theirs.keys()
    assert theirs
    assert skipped(many) == skipped(one)
    here, there = values(many), values(one)
    assert here.keys() == there.keys()
    return Distance(
        max(abs(ours[step] / loss - 1) for step, loss in theirs.items()),
        max(
            float(np.abs(here[key] - value).max() / max(np.abs(value).max(), 1e-2))
            for key, value in there.items()
        ),
    )


def skipped(found: Found) -> list[int]:
    """Return the steps that overflowed."""
    steps = [event for event in found[0]["events"] if event["type"] == "step"]
    return [event["step"] for event in steps if event.get("skipped")]


def values(found: Found) -> dict[tuple[str, str], Any]:
    """Put together what all ranks would save, each tensor in the order of its shape.

    Weights of which ranks have columns are saved column after column.
    """
    flats = whole(found)
    orders = {name: order for of_rank in found for name, order in of_rank["orders"].items()}
    ordered = {}
    for key, flat in flats.items():
        if key[0] not in orders:  # a buffer
            ordered[key] = flat
            continue
        shape, stride = orders[key[0]]
        strides = [step * flat.itemsize for step in stride]
        ordered[key] = np.lib.stride_tricks.as_strided(flat, shape, strides)
    return ordered


def same_bits(ours: Found, theirs: Found) -> bool:
    """Return whether two runs have the same losses, parameters and moments."""
    here, there = whole(ours), whole(theirs)
    return (
        losses(ours[0]) == losses(theirs[0])
        and here.keys() == there.keys()
        and all(np.array_equal(here[key], there[key]) for key in there)
    )


def assert_equal(ours: Tensors, theirs: Tensors, close: float = 0.0) -> None:
    """Compare what two runs would save: to the bit, or as close as this."""
    assert ours.keys() == theirs.keys()
    for key, values in theirs.items():
        if close:
            np.testing.assert_allclose(ours[key], values, rtol=close, atol=close, err_msg=str(key))
        else:
            np.testing.assert_array_equal(ours[key], values, err_msg=str(key))


def assert_close(many: Found, one: Found, close: float) -> None:
    """Compare two runs to rounding; ranks that tell losses tell the same."""
    assert all(losses(each) in ({}, losses(many[0])) for each in many)
    apart = distance(many, one)
    assert apart.is_within(close), apart
