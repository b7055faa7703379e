"""A few numbers by name: in one tensor on the device, and on their way to the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch

from zrun_core.hardware import accelerator


def on_device(numbers: Sequence[float], device: torch.device) -> torch.Tensor:
    """Return `numbers` on `device`, [n] float64, without waiting for what is queued there."""
    return sent_to(device, torch.tensor(numbers, dtype=torch.float64))


def sent_to(device: torch.device, values: torch.Tensor) -> torch.Tensor:
    """Return `values` on `device`, without waiting for what is queued there.

    Args:
        values: few, there already or on the host.
    """
    if accelerator.is_accelerator(device) and not accelerator.is_accelerator(values.device):
        values = values.pin_memory()
    return values.to(device, non_blocking=True)


class NamedVector:
    """Numbers by name.

    Attributes:
        names: in the order in which the numbers lie.
        values: [n] float64, on the device.
    """

    def __init__(self, names: Sequence[str], values: torch.Tensor) -> None:
        self.names = tuple(names)
        self.values = values

    @classmethod
    def of(cls, device: torch.device, **numbers: float) -> Self:
        """Return `numbers` on `device`, without waiting for what is queued there."""
        return cls(tuple(numbers), on_device(list(numbers.values()), device))

    def __getitem__(self, name: str) -> torch.Tensor:
        """Return the number called `name`, 0-d: a view."""
        return self.values[self.names.index(name)]

    def add(self, **numbers: float | torch.Tensor) -> None:
        """Add to the numbers of these names."""
        for name, number in numbers.items():
            self[name].add_(number)

    def extended(self, **numbers: torch.Tensor) -> NamedVector:
        """Return a vector that has 0-d `numbers` of the same device too."""
        more = torch.stack([number.double() for number in numbers.values()])
        return NamedVector((*self.names, *numbers), torch.cat([self.values, more]))


@dataclass(frozen=True)
class HostCopy:
    """Copy of a vector of numbers on the host, which may still be on its way.

    Attributes:
        vector: on the host; its values are there once `arrived` has happened.
    """

    vector: NamedVector
    arrived: accelerator.Event | None

    @classmethod
    def of(cls, vector: NamedVector) -> Self:
        """Send them after what was issued before, and before what comes next."""
        device = vector.values.device
        if not accelerator.is_accelerator(device):
            return cls(vector, None)
        on_host = vector.values.to("cpu", non_blocking=True)  # to pinned memory
        return cls(NamedVector(vector.names, on_host), accelerator.Event(device))

    def read(self) -> dict[str, float]:
        """Wait for them."""
        if self.arrived is not None:
            self.arrived.wait_on_host()
        return dict(zip(self.vector.names, self.vector.values.tolist(), strict=True))
