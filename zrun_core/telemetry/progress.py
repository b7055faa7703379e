"""Counters of a run: how far it is, and how many steps in a row were skipped."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Self

# Keys of a manifest that are not the names of fields: old checkpoints have them.
_KEYS = {"unrecoverable_skips": "helpless_skips"}
# Counters that some older checkpoints lack.
_YOUNGER: dict[str, Any] = {"first_loss": None, "seconds": None}


@dataclass
class Progress:
    """Counters of a run, the same on every rank.

    Attributes:
        steps: optimizer steps issued, skipped ones included.
        updates: those that changed the parameters: the learning rate follows them.
        micro_batches: of this rank.
        skips: skipped steps of the run.
        skips_in_a_row: the newest of them, as far as they were skipped for their numbers.
        unrecoverable_skips: the last of these that no smaller loss scale could have helped.
        samples, tokens: over all ranks.
        loss: of the last step whose totals were read, over all ranks.
        first_loss: of the run's first step; None before it, and if a checkpoint lacks it.
        seconds: of training by this rank's clock, earlier attempts included; None if not known.
    """

    steps: int = 0
    updates: int = 0
    micro_batches: int = 0
    skips: int = 0
    skips_in_a_row: int = 0
    unrecoverable_skips: int = 0
    samples: int = 0
    tokens: int = 0
    loss: float = float("nan")
    first_loss: float | None = None
    seconds: float | None = 0.0

    def to_json(self) -> dict[str, Any]:
        """Return the counters under the keys of a manifest's `progress`."""
        found = {_KEYS.get(name, name): value for name, value in asdict(self).items()}
        for key in ("loss", "first_loss"):
            if found[key] is not None and not math.isfinite(found[key]):
                found[key] = None
        return found

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Self:
        """Restore the result of `to_json`, which may lie among other keys.

        Raises:
            KeyError: a counter is missing.
        """
        found = _YOUNGER | dict(found)
        values = {each.name: found[_KEYS.get(each.name, each.name)] for each in fields(cls)}
        if values["loss"] is None:
            values["loss"] = float("nan")
        return cls(**values)
