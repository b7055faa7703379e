"""Pieces of memory as plans and the runtime name them: their contents and place. Without torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum, StrEnum

from zrun_core.spine.sections.activations import ActivationsConfig
from zrun_core.spine.sections.offload import OffloadConfig


class Kind(Enum):
    """The contents of a buffer."""

    PARAM = "params"
    GRAD = "grads"
    OPTIM = "optim"  # fp32 master copy and the optimizer's moments
    RING = "rings"  # constant-size scratch: of gathers and reductions, and of copies between tiers
    BUFFER = "buffers"  # of modules, such as running statistics
    ACTIVATION = "activations"  # kept from forward for backward
    TEMP = "temporaries"
    CONTEXT = "context"  # what the device's libraries take for themselves


class Tier(StrEnum):
    """The memory in which a buffer lies."""

    DEVICE = "device"  # where training computes; of a job on CPUs that is the host's memory
    HOST = "host"
    DISK = "disk"


@dataclass(frozen=True)
class Buffer:
    """One allocation of one rank.

    Attributes:
        pinned: host memory that the device copies from and to by itself, and that is never swapped
            out.
        phases: of a step in which it is alive, as the planner names them; None: all the time.
    """

    name: str
    kind: Kind
    num_bytes: int
    tier: Tier = Tier.DEVICE
    pinned: bool = False
    phases: frozenset[str] | None = None

    @property
    def is_moment(self) -> bool:
        """Return whether it is one of the values that an optimizer keeps for each parameter."""
        state = self.name.rpartition("/")[2]
        return self.kind is Kind.OPTIM and state.startswith("moment")


@dataclass(frozen=True)
class Placement:
    """The tiers on which a unit's states have their home.

    A block's checkpointed input has one too, although it belongs to no unit. Ren et al. 2021
    ("ZeRO-Offload") keep gradients and the optimizer on the host, Rajbhandari et al. 2021
    ("ZeRO-Infinity") any of these on any tier. The update runs on the host wherever the optimizer
    is not on the device.

    Attributes:
        fraction: share of the elements whose states leave the device: see `place`.
    """

    param: Tier = Tier.DEVICE
    grad: Tier = Tier.DEVICE
    optimizer: Tier = Tier.DEVICE
    activation: Tier = Tier.DEVICE
    fraction: float = 1.0

    @property
    def is_on_device(self) -> bool:
        """True if no state of a unit leaves the device."""
        return {self.param, self.grad, self.optimizer} == {Tier.DEVICE}

    def uses(self, tier: Tier) -> bool:
        """Return whether a state or a checkpointed input lives on `tier`."""
        return tier in (self.param, self.grad, self.optimizer, self.activation)

    def where_host_is_device(self) -> Placement:
        """Return the same on a machine that computes in the host's memory."""

        def tier(given: Tier) -> Tier:
            return Tier.DEVICE if given is Tier.HOST else given

        return replace(
            self,
            param=tier(self.param),
            grad=tier(self.grad),
            optimizer=tier(self.optimizer),
            activation=tier(self.activation),
        )

    def tier_of(self, kind: Kind) -> Tier:
        """Return the home of a unit's parameters, gradients or optimizer states."""
        return {Kind.PARAM: self.param, Kind.GRAD: self.grad, Kind.OPTIM: self.optimizer}[kind]


ON_DEVICE = Placement()


def placement_of(offload: OffloadConfig, activations: ActivationsConfig, device: str) -> Placement:
    """Return where states live. What computes in the host's memory has no other host.

    Args:
        offload, activations: sections of a job.
        device: type of what trains, "cpu" or "cuda".
    """
    asked = Placement(
        param=Tier(offload.param),
        grad=Tier(offload.grad_tier),
        optimizer=Tier(offload.optimizer),
        activation=Tier(activations.offload),
        fraction=offload.most_away,
    )
    return asked.where_host_is_device() if device == "cpu" else asked
