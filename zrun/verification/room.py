"""Whether this host has the memory for the plain loop of a verification. Pure.

It holds the whole model on one rank, once for each data-parallel rank, and beside it, once: values,
an optimizer of torch, a step as the ranks have recorded it, its gradient, and what the run begins
with that goes on from the save.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from zrun_core.sizes import format_size
from zrun_core.spine.config import JobConfig

_VALUE = 4  # bytes of an element, in fp32
_ONE_MOMENT = ("lars", "lion", "muon")
# The masters and values of a parameter, its record (value and gradient), the gradient of a
# micro-batch and the sum of them, and the values that the save has.
_COPIES = 2 + 2 + 2 + 1


@dataclass(frozen=True)
class Place:
    """Memory, and what it is called."""

    num_bytes: int
    name: str


@dataclass(frozen=True)
class PlainNeeds:
    """What the plain loop takes at least.

    Attributes:
        per_replica: bytes of a model.
        of_all: bytes that it holds once.
    """

    per_replica: int
    of_all: int

    @classmethod
    def of(cls, job: JobConfig, num_parameters: int, num_trainable: int) -> PlainNeeds:
        """Return it by the numbers of elements of a model's parameters."""
        moments = 2
        if job.optim.name in _ONE_MOMENT:
            moments = 1
        elif job.optim.name == "sgd":
            moments = 1 if job.optim.args.get("momentum") else 0
        copies = _COPIES + 2 * moments  # those of the save, too
        return cls(_VALUE * num_parameters, _VALUE * copies * num_trainable)

    def taken(self, replicas: int, on_device: Place | None) -> list[tuple[int, bool]]:
        """Return the bytes that so many models take, and whether that is on their device."""
        if on_device is None:
            return [(self.of_all + replicas * self.per_replica, False)]
        models = (replicas + 1) * self.per_replica  # with the gradient of one
        return [(models, True), (self.of_all, False)]


def why_too_large(
    needs: PlainNeeds,
    replicas: int,
    of_model: int,
    on_host: Place,
    on_device: Place | None,
    advice: Sequence[str],
) -> str:
    """Return why the plain loop has no room, and what to write; "" if it has some.

    Args:
        replicas: of the model.
        of_model: ranks that share one.
        on_host: memory that it may take.
        on_device: that of the GPU which has its models; None: the host has them.
        advice: how the model becomes smaller.
    """

    def lacking(number: int) -> tuple[int, Place] | None:
        for num_bytes, is_on_device in needs.taken(number, on_device):
            place = on_device if is_on_device else on_host
            if place is not None and num_bytes > place.num_bytes:
                return num_bytes, place
        return None

    found = lacking(replicas)
    if found is None:
        return ""
    needed, place = found
    whole = "the whole model on one rank"
    if replicas > 1:
        whole += f", once for each of {replicas} data-parallel ranks"
    fewer = next((number for number in range(replicas - 1, 0, -1) if lacking(number) is None), 0)
    ways = [*advice, *([f"write --slots {fewer * of_model}"] if fewer else [])]
    return (
        f"the plain loop does not fit: it holds {whole}, with an optimizer and what the ranks have "
        f"recorded: at least {format_size(needed)}, more than the "
        f"{format_size(place.num_bytes)} {place.name}: {'; or '.join(ways)}"
    )
