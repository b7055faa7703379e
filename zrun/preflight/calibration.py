"""Measured rates of hosts and of the links between them: `Calibration.read(path)`.

All rates are per second, in bytes or floating-point operations; times are in seconds. What a host
could not measure is None.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from zrun_core.errors import JobError, ZrunError
from zrun_core.spine.folders import make_private


class _Part(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)  # a later zrun may measure more


class MatmulRates(_Part):
    """Of square matrix products; a multiply-add is two operations."""

    fp32_flops: float
    bf16_flops: float
    fp16_flops: float | None = None


class GpuRates(MatmulRates):
    uuid: str
    name: str
    copy_bytes_per_s: float  # from its memory to its memory, each byte counted once
    to_device_bytes_per_s: float  # from pinned memory of the host
    from_device_bytes_per_s: float


class DiskRates(_Part):
    folder: str
    direct: bool | None = None  # past the page cache
    write_bytes_per_s: float | None = None
    read_bytes_per_s: float | None = None
    error: str | None = None  # why nothing was measured


class StreamRates(_Part):
    """Of elementwise operators that read and write memory, by format."""

    fp32_bytes_per_s: float
    bf16_bytes_per_s: float


class MessageRates(_Part):
    """Of exchanges between two ranks on the cores of a host, as their collectives do it."""

    seconds: float  # of next to nothing: what both compute for it, one after the other
    bytes_per_s: float  # that each of them gets of the other, from cores that were free


class HostRates(_Part):
    cpu: MatmulRates  # of all its cores
    cpu_side: int | None = None  # of the matrices that were multiplied; None: by an earlier zrun
    copy_bytes_per_s: float  # from memory to memory, each byte counted once
    disk: DiskRates
    gpus: tuple[GpuRates, ...] = ()
    streams: StreamRates | None = None  # of all its cores; None: made by an earlier zrun
    layers: StreamRates | None = None  # the same, of tensors as small layers make them
    attention: MatmulRates | None = None  # of all its cores, fused and with its backward
    operator_s: float | None = None  # of an operator on next to nothing, on a core
    inner_s: float | None = None  # the same of one that a kernel calls
    messages: MessageRates | None = None  # None: of an earlier zrun, or ranks use sockets


class LinkRates(_Part):
    """TCP from one host to another."""

    source: str
    target: str
    bytes_per_s: float
    round_trip_s: float


class Calibration(_Part):
    version: Literal[1] = 1
    made: str  # ISO 8601, UTC
    zrun: str
    hosts: dict[str, HostRates]
    links: tuple[LinkRates, ...] = ()

    @staticmethod
    def default_path(environ: Mapping[str, str]) -> Path:
        """Return `zrun/calibration.json` in the user's cache folder."""
        cache = environ.get("XDG_CACHE_HOME") or os.path.join(environ.get("HOME", "~"), ".cache")
        return Path(cache).expanduser() / "zrun" / "calibration.json"

    @classmethod
    def read(cls, path: Path) -> Self:
        """Return the calibration stored at `path`.

        Raises:
            JobError: there is none, or it is something else.
        """
        try:
            return cls.model_validate_json(path.read_bytes())
        except OSError as error:
            raise JobError(f"{path}: {error.strerror}: measure with zrun doctor --bench") from None
        except ValidationError:
            raise JobError(
                f"{path} is no calibration of this zrun: measure again with zrun doctor --bench"
            ) from None

    def write(self, path: Path) -> None:
        """Store it at `path`, in one move.

        Raises:
            ZrunError: nothing can be written there.
        """
        part = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
        try:
            make_private(path.parent)
            part.touch(mode=0o600, exist_ok=False)
            part.write_text(self.model_dump_json(indent=1) + "\n", encoding="utf-8")
            part.replace(path)
        except OSError as error:
            with suppress(OSError):
                part.unlink()
            raise ZrunError(f"{path}: {error.strerror}; name another place with --save") from None
