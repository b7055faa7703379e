"""The random streams of a rank: Python's, numpy's if it is in use, torch's on the CPU and on the rank's GPU."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch

from zrun_core.errors import CheckpointError


def seed(value: int) -> None:
    """Begin the streams of the CPU anew; `value` is within 32 bits."""
    random.seed(value)
    torch.default_generator.manual_seed(value)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(value)


def capture(device: torch.device) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """(1-D tensors on the CPU, small JSON values), by name of the stream."""
    version, words, gauss = random.getstate()
    tensors = {"python": torch.tensor(words, dtype=torch.int64), "torch": torch.get_rng_state()}
    numbers: dict[str, Any] = {"python": {"version": version, "gauss": gauss}}
    if (numpy := sys.modules.get("numpy")) is not None:
        kind, keys, position, has_gauss, cached = numpy.random.get_state()
        tensors["numpy"] = torch.from_numpy(keys.astype("int64"))
        numbers["numpy"] = {"kind": kind, "position": position, "has_gauss": has_gauss, "cached": cached}
    if device.type == "cuda":
        tensors["cuda"] = torch.cuda.get_rng_state(device)
    return tensors, numbers


def restore(tensors: Mapping[str, torch.Tensor], numbers: Mapping[str, Any], device: torch.device) -> None:
    """Go on with the streams that `capture` saw. Those that it did not see, or that are not here, stay as they are."""
    _set(tensors, numbers, random, torch.default_generator, lambda numpy: numpy.random)
    if "cuda" in tensors and device.type == "cuda":
        torch.cuda.set_rng_state(tensors["cuda"], device)


def check(tensors: Mapping[str, torch.Tensor], numbers: Mapping[str, Any], device: torch.device) -> None:
    """Whether `restore` can go on with them, found out with generators that nobody draws from.

    Raises:
        CheckpointError: it cannot.
    """
    try:
        _set(tensors, numbers, random.Random(), torch.Generator(), lambda numpy: numpy.random.RandomState())
        if "cuda" in tensors and device.type == "cuda":
            torch.Generator(device).set_state(tensors["cuda"])
    except (LookupError, TypeError, ValueError, ArithmeticError, RuntimeError) as error:
        reason = str(error).partition("\n")[0]
        raise CheckpointError(f"no random stream can go on from it: {type(error).__name__}: {reason}") from None


def _set(
    tensors: Mapping[str, torch.Tensor],
    numbers: Mapping[str, Any],
    python: Any,
    cpu: torch.Generator,
    numpy_stream: Callable[[Any], Any],
) -> None:
    own = numbers["python"]
    gauss = None if own["gauss"] is None else float(own["gauss"])
    python.setstate((own["version"], tuple(tensors["python"].tolist()), gauss))
    cpu.set_state(tensors["torch"])
    if "numpy" in tensors:
        import numpy

        own, keys = numbers["numpy"], tensors["numpy"].numpy().astype("uint32")
        if not 0 <= own["position"] <= len(keys):  # numpy would read beyond them
            raise ValueError(f"position {own['position']}")
        state = (own["kind"], keys, own["position"], int(own["has_gauss"]), float(own["cached"]))
        numpy_stream(numpy).set_state(state)
