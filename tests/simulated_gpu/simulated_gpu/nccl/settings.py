"""Settings of simulated NCCL: those of SIMULATED_GPU whose names begin with `nccl_`."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

PREFIX = "nccl_"


@dataclass
class Settings:
    """How NCCL behaves where it may behave in several ways.

    Attributes:
        buffer: bytes up to which a message is over for its sender before it is received. NCCL's
            own buffers take small messages; with 0 no program can rely on that.
        concurrent: collectives of one device that may run at a time, in the order in which they
            were launched, whatever their communicators; 0: any number. With 1 two ranks that
            issue those of two groups in different orders wait for ever, as they do where one
            kernel takes the place of another.
        remote_errors: 1: a rank that ends is an error for the others, as over a network; 0: they
            hang, as within a host.
        timeout_s: seconds after which torch's watchdog ends a process, whatever its groups ask for;
            0: as they do.
        group_mib, pair_mib: of a device that the communicator of a group, and that of two ranks
            for their messages, take.
    """

    buffer: int = 0
    concurrent: int = 0
    remote_errors: int = 0
    timeout_s: float = 0.0
    group_mib: float = 0.0
    pair_mib: float = 0.0


settings = Settings()
NAMES: dict[str, type] = {
    PREFIX + field.name: type(getattr(settings, field.name)) for field in fields(Settings)
}


def take(found: dict[str, Any]) -> dict[str, Any]:
    """Obey the settings of NCCL among `found`; return the others."""
    for name in NAMES:
        if name in found:
            setattr(settings, name.removeprefix(PREFIX), found[name])
    return {name: value for name, value in found.items() if name not in NAMES}
