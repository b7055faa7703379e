"""Layouts of random models: six families, of each a variant that follows a seed.

    layout_of("pp", 17)     what is beside the stages is drawn: places, formats, recomputation
    plain("pp")             the same family, as seeds that once failed had it

Variants have a generator of their own, so the program of a seed is the same whatever they become.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

PAIRS = {"*.up": "colwise", "*.down": "rowwise"}
_TP: dict[str, Any] = {"parallel.tp": 2, "parallel.plan": PAIRS}
_RECOMPUTED = {"activations.checkpoint": "full"}
# By name: keys of the job, and its data-parallel ranks.
FAMILIES: dict[str, tuple[Mapping[str, Any], int]] = {
    "zero 3, recomputed": ({"zero.stage": 3, **_RECOMPUTED}, 2),
    "pp": ({"parallel.pp": 2}, 1),
    "interleaved": ({"parallel.pp": 2, "parallel.schedule": "interleaved"}, 1),
    "tp": (_TP, 1),
    "sequence": ({**_TP, "parallel.sequence": True}, 1),
    "layer-major, offload": (
        {"zero.stage": 3, "parallel.schedule": "layer_major", "offload.optimizer": "host"},
        2,
    ),
}
_DEPTH = 4  # blocks of a model


@dataclass(frozen=True)
class Layout:
    """Of a family, and what its variant changes.

    Attributes:
        family: its name.
        changes: values by key of the job.
    """

    family: str
    changes: Mapping[str, Any] = field(default_factory=dict)

    @property
    def dp(self) -> int:
        """Data-parallel ranks."""
        return FAMILIES[self.family][1]

    @property
    def dims(self) -> dict[str, int]:
        """Ranks along each axis."""
        found = {**FAMILIES[self.family][0], **self.changes}
        return {"dp": self.dp, **{a: found.get(f"parallel.{a}", 1) for a in ("tp", "pp")}}

    @property
    def keys(self) -> dict[str, Any]:
        """All keys of the job, as sections."""
        return _sections({**FAMILIES[self.family][0], **self.changes})

    @property
    def alone(self) -> dict[str, Any]:
        """Keys of the job that one rank has too: its batch and its format."""
        kept = ("batch.", "precision.")
        return _sections({k: v for k, v in self.changes.items() if k.startswith(kept)})

    def without(self, key: str) -> Layout:
        """Return it as its family has a key."""
        return replace(self, changes={k: v for k, v in self.changes.items() if k != key})

    def __str__(self) -> str:
        return f"{self.family} {json.dumps(self.changes)}"


def plain(family: str, seed: int) -> Layout:
    """Return the layout that a seed had before variants were drawn."""
    return Layout(family, {"precision.compute": "bf16"} if seed % 6 == 5 else {})


def layout_of(family: str, seed: int) -> Layout:
    """Return the variant of a seed."""
    draw = random.Random(f"{family}, {seed}")
    given = FAMILIES[family][0]
    found: dict[str, Any] = {"batch.micro": draw.choice([1, 2, 2, 2, 4])}
    if draw.random() < 1 / 6:
        found["precision.compute"] = "bf16"
    if "parallel.pp" in given:
        found |= _cut(draw, given)
    if "parallel.tp" in given:
        found |= {"parallel.plan": _plan(draw)}
    found |= _states(draw, given)
    found |= _recomputation(draw, given)
    return Layout(family, {key: value for key, value in found.items() if given.get(key) != value})


def _cut(draw: random.Random, given: Mapping[str, Any]) -> dict[str, Any]:
    """Draw the order of passes, and the blocks with which stages begin."""
    if "parallel.schedule" in given:  # as many chunks as blocks: there is one way
        return {}
    found: dict[str, Any] = {"parallel.schedule": draw.choice(["1f1b", "gpipe", "zero_bubble"])}
    if draw.random() < 0.5:
        found["parallel.split"] = [f"blocks.{draw.randrange(1, _DEPTH)}"]
    return found


def _plan(draw: random.Random) -> dict[str, str]:
    """Draw which linears are divided, and how."""
    block = f"blocks.{draw.randrange(_DEPTH)}"
    pairs = {f"{block}.up": "colwise", f"{block}.down": "rowwise"}
    found = draw.choice(
        [
            *(PAIRS, PAIRS, PAIRS, pairs),
            {"*.up": "colwise_gather_output"},
            {"*.down": "rowwise_split_input"},
            {"*.up": "colwise_gather_output", f"{block}.down": "rowwise_split_input"},
        ]
    )
    of_tokens = draw.choice([{}, {}, {"head": "head"}, {"head": "head", "embed": "vocabulary"}])
    return {**found, **of_tokens}


def _states(draw: random.Random, given: Mapping[str, Any]) -> dict[str, Any]:
    """Draw who has states of the optimizer, gradients and parameters, and on which tier."""
    stage = draw.choice([0, 1, 2, 3]) if "zero.stage" not in given else given["zero.stage"]
    if given.get("parallel.schedule") == "layer_major":
        stage = draw.choice([3, 3, 2, 1])
    found: dict[str, Any] = {"zero.stage": stage}
    if draw.random() < 0.2:
        found["zero.bucket"] = draw.choice(["1KiB", "8KiB"])
    optimizer = draw.choice(["device", "device", "host", "disk"])
    found["offload.optimizer"] = optimizer
    if stage == 3:
        found["offload.param"] = draw.choice(["device", "device", "host", "disk"])
        if draw.random() < 0.3:
            found["zero.prefetch"] = draw.choice([0, 3])
        if draw.random() < 0.3:
            found["zero.persist_below"] = 100
    if {optimizer, found.get("offload.param", "device")} != {"device"}:
        if draw.random() < 0.2:
            found["offload.fraction"] = 0.5
        if optimizer != "device" and draw.random() < 0.3:
            found["offload.schedule"] = "serial"
    return found


def _recomputation(draw: random.Random, given: Mapping[str, Any]) -> dict[str, Any]:
    """Draw what backward computes again, and where the inputs of that wait."""
    kinds = ["none", "none", "full", "every_n", "selective"]
    if "activations.checkpoint" in given:
        kinds = ["full", "full", "full", "every_n", "selective"]
    found: dict[str, Any] = {"activations.checkpoint": draw.choice(kinds)}
    if found["activations.checkpoint"] not in ("full", "every_n"):
        return found
    if draw.random() < 0.3:
        found["activations.offload"] = draw.choice(["host", "disk"])
    elif "parallel.tp" in given and draw.random() < 0.4:
        found["activations.partition"] = True
    return found


def _sections(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Return keys as a job has them: `zero.stage` as `stage` in `zero`."""
    found: dict[str, Any] = {}
    for path, value in flat.items():
        section, key = path.split(".")
        found.setdefault(section, {})[key] = value
    return found
