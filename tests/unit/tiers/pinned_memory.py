"""A driver that pins as much host memory as it may, and remembers what it has pinned."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Self

import pytest
import torch

from zrun_core.hardware import accelerator


class Driver:
    """Pins memory in place of CUDA.

    Attributes:
        left: bytes that it may still pin.
        registered: bytes by the address of the first one.
        forgotten: devices of which an error was forgotten.
    """

    def __init__(self) -> None:
        self.left = 1 << 40
        self.registered: dict[int, int] = {}
        self.forgotten: list[torch.device] = []

    @classmethod
    def take_place(cls, monkeypatch: pytest.MonkeyPatch) -> Self:
        made = cls()
        monkeypatch.setattr(torch, "cuda", SimpleNamespace(cudart=lambda: made))
        monkeypatch.setattr(accelerator, "forget_error", made.forgotten.append)
        return made

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:  # noqa: N802
        assert flags == 0
        assert address not in self.registered
        if num_bytes > self.left:
            return 2
        self.left -= num_bytes
        self.registered[address] = num_bytes
        return 0

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        del self.registered[address]
        return 0

    def cudaGetErrorString(self, error: int) -> str:  # noqa: N802
        return {2: "out of memory"}[error]
