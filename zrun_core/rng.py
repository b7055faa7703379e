"""The random streams of a rank: Python's, numpy's if it is in use, torch's on the CPU and on the rank's GPU."""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping
from typing import Any

import torch


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
    python = numbers["python"]
    random.setstate((python["version"], tuple(tensors["python"].tolist()), python["gauss"]))
    torch.set_rng_state(tensors["torch"])
    if "numpy" in tensors:
        import numpy

        own = numbers["numpy"]
        keys = tensors["numpy"].numpy().astype("uint32")
        numpy.random.set_state((own["kind"], keys, own["position"], own["has_gauss"], own["cached"]))
    if "cuda" in tensors and device.type == "cuda":
        torch.cuda.set_rng_state(tensors["cuda"], device)
