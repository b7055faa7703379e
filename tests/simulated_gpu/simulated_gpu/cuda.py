"""`torch.cuda` on the simulated device: what zrun, its tests and torch itself call of it."""

from __future__ import annotations

import atexit
import contextlib
import os
import types
from collections.abc import Iterator
from typing import Any

import torch

from simulated_gpu import settings as names
from simulated_gpu.install import extension
from simulated_gpu.nccl import settings as nccl_settings

ext = extension()
NAME = "Simulated GPU"
_visible: list[int] = []  # the numbers on the host of the devices that this process sees
_outside: dict[int, int] = {}  # bytes of each device that no allocator of torch's has given out


def _index(device: Any = None) -> int:
    if device is None:
        return int(ext.current_device())
    if isinstance(device, int):
        return int(ext.current_device()) if device < 0 else device
    device = torch.device(device)
    if device.type != "cuda":
        raise ValueError(f"Expected a cuda device, but got: {device}")
    return int(ext.current_device()) if device.index is None else int(device.index)


def _device(device: Any = None) -> torch.device:
    return torch.device("cuda", _index(device))


class Stream(torch.Stream):
    def __new__(cls, device: Any = None, priority: int = 0, **known: int) -> Any:
        if known:
            return super().__new__(cls, **known)
        return super().__new__(cls, _device(device), priority=priority)

    @property
    def cuda_stream(self) -> int:
        return int(self.stream_id + 1000 * self.device_index)


class Event:
    """Makes a `torch.Event`: the time between two is not told of classes derived from it."""

    def __new__(
        cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False
    ) -> Any:
        return torch.Event(_device(), enable_timing=enable_timing)


def current_stream(device: Any = None) -> Any:
    found = torch.accelerator.current_stream(_device(device))
    return Stream(
        stream_id=found.stream_id, device_index=found.device_index, device_type=found.device_type
    )


def default_stream(device: Any = None) -> Any:
    return Stream(stream_id=0, device_index=_index(device), device_type=1)


def set_stream(stream: Any) -> None:
    if stream is not None:
        ext.set_device(stream.device.index)
        torch.accelerator.set_stream(stream)


@contextlib.contextmanager
def stream(chosen: Any) -> Iterator[Any]:
    if chosen is None:
        yield
        return
    device = ext.current_device()
    before = current_stream(chosen.device)
    set_stream(chosen)
    try:
        yield chosen
    finally:
        set_stream(before)
        ext.set_device(device)


class device_context:  # noqa: N801
    def __init__(self, device: Any) -> None:
        self.idx = _index(device)

    def __enter__(self) -> None:
        self._before = ext.current_device()
        ext.set_device(self.idx)

    def __exit__(self, *_: object) -> None:
        ext.set_device(self._before)


def memory_stats(device: Any = None) -> dict[str, int]:
    """Return the counters of the allocator by torch's names, which are paths: `active.all.peak`."""
    found: dict[str, int] = {}

    def put(prefix: str, counters: dict[str, Any]) -> None:
        for name, value in counters.items():
            if isinstance(value, dict):
                put(f"{prefix}{name}.", value)
            else:
                found[prefix + name] = value

    put("", ext.stats(_index(device)))
    found["max_split_size"] = -1  # there is none, so no block is too large to be split
    for name in ("oversize_allocations", "oversize_segments"):
        found |= {f"{name}.{each}": 0 for each in ("current", "peak", "allocated", "freed")}
    return dict(sorted(found.items()))


def _counter(name: str) -> Any:
    return lambda device=None: memory_stats(device)[name]


def mem_get_info(device: Any = None) -> tuple[int, int]:
    reserved = memory_stats(device)["reserved_bytes.all.current"]
    total = _total_memory()
    return total - _outside.get(_index(device), 0) - reserved, total


class _NoGraphs:
    """In the place of what captures kernels: a graph of none would be one that does nothing."""

    def __init__(self, *_: object, **__: object) -> None:
        raise NotImplementedError("the simulated GPU has no graphs")


class _Cudart:
    """The functions of the CUDA runtime that torch hands out."""

    class cudaError(int):  # noqa: N801
        success = 0

    @staticmethod
    def cudaHostRegister(address: int, num_bytes: int, flags: int) -> int:  # noqa: N802
        ext.host_register(address, num_bytes)
        return 0

    @staticmethod
    def cudaHostUnregister(address: int) -> int:  # noqa: N802
        ext.host_unregister(address)
        return 0

    @staticmethod
    def cudaGetErrorString(code: int) -> str:  # noqa: N802
        return f"error {int(code)}"


def _manual_seed_all(seed: int) -> None:
    for number in range(ext.device_count()):
        ext.default_generator(number).manual_seed(int(seed))


def _set_sync_debug_mode(mode: int | str) -> None:
    number = {"default": 0, "warn": 1, "error": 2}[mode] if isinstance(mode, str) else mode
    ext.configure(sync_debug=number)


def _properties(device: Any = None) -> Any:
    return types.SimpleNamespace(
        name=NAME,
        major=9,
        minor=0,
        total_memory=_total_memory(),
        multi_processor_count=1,
        uuid=names.uuid(_visible[_index(device)]).removeprefix("GPU-"),
        gcnArchName="",
    )


def _total_memory() -> int:
    return int(ext.memory()) + max(_outside.values(), default=0)


def take_outside(device: Any, num_bytes: int) -> None:
    """Take memory of a device that torch knows nothing of, as drivers and NCCL do.

    Of a process with several devices, all have as much less as the one that lacks most.
    """
    total = _total_memory()
    index = _index(device)
    _outside[index] = _outside.get(index, 0) + num_bytes
    ext.configure(memory=total - max(_outside.values()))


def install(settings: dict[str, Any]) -> None:
    """Give this process its devices, and `torch.cuda` the functions of this module."""
    settings = nccl_settings.take(settings)
    devices = settings.pop("devices", names.DEVICES)
    _visible[:] = names.visible(devices, os.environ.get("CUDA_VISIBLE_DEVICES"))
    # Ranks with the same delays would hide what only happens when one is late.
    seed = settings.pop("seed", 1) * 1000 + int(os.environ.get("RANK", "0"))
    ext.configure(devices=len(_visible), seed=seed, **settings)
    _patch_cuda()
    _patch_storages()
    atexit.register(ext.stop_streams)
    from simulated_gpu import nccl, python_kernels  # noqa: F401

    nccl.install()


def _patch_cuda() -> None:
    changed = {
        "_lazy_init": lambda: None,
        "init": lambda: None,
        "is_initialized": lambda: True,
        "_initialized": True,
        "is_available": lambda: ext.device_count() > 0,
        "_is_in_bad_fork": lambda: ext.is_forked(),
        "device_count": lambda: ext.device_count(),
        "current_device": lambda: ext.current_device(),
        "set_device": lambda device: ext.set_device(_index(device)),
        "device": device_context,
        "synchronize": lambda device=None: torch.accelerator.synchronize(_device(device)),
        "Stream": Stream,
        "Event": Event,
        "stream": stream,
        "set_stream": set_stream,
        "current_stream": current_stream,
        "default_stream": default_stream,
        "memory_stats": memory_stats,
        "memory_allocated": _counter("allocated_bytes.all.current"),
        "max_memory_allocated": _counter("allocated_bytes.all.peak"),
        "memory_reserved": _counter("reserved_bytes.all.current"),
        "max_memory_reserved": _counter("reserved_bytes.all.peak"),
        "reset_peak_memory_stats": lambda d=None: ext.reset_peak(_index(d)),
        "reset_accumulated_memory_stats": lambda d=None: ext.reset_accumulated(_index(d)),
        "mem_get_info": mem_get_info,
        "empty_cache": lambda: ext.empty_cache(),
        "get_device_name": lambda d=None: NAME,
        "get_device_properties": _properties,
        "get_device_capability": lambda d=None: (9, 0),
        "is_bf16_supported": lambda *_, **__: True,
        "get_rng_state": lambda d="cuda": ext.default_generator(_index(d)).get_state(),
        "set_rng_state": lambda s, d="cuda": ext.default_generator(_index(d)).set_state(s),
        "get_rng_state_all": lambda: [
            ext.default_generator(number).get_state() for number in range(ext.device_count())
        ],
        "manual_seed": lambda seed: ext.default_generator(-1).manual_seed(int(seed)),
        "manual_seed_all": _manual_seed_all,
        "cudart": lambda: _Cudart,
        "set_sync_debug_mode": _set_sync_debug_mode,
        "get_sync_debug_mode": lambda: ext.sync_debug(),
        "is_current_stream_capturing": lambda: False,
        "CUDAGraph": _NoGraphs,
        "graph": _NoGraphs,
        "make_graphed_callables": _NoGraphs,
    }
    for name, value in changed.items():
        setattr(torch.cuda, name, value)
    torch.cuda.default_generators = tuple(
        ext.default_generator(number) for number in range(ext.device_count())
    )
    for module in (torch.cuda.random, torch.cuda.memory, torch.cuda.graphs):
        for name in changed:
            if hasattr(module, name):
                setattr(module, name, changed[name])


def _patch_storages() -> None:
    """Storages that are resized or cloned ask for what only torch's wheel for CUDA has."""
    resize = torch.UntypedStorage.resize_
    clone = torch.UntypedStorage.clone

    def clone_(self: Any) -> Any:  # `copy.deepcopy` of a tensor calls it
        if self.device.type != "cuda":
            return clone(self)
        own = torch.empty(0, dtype=torch.uint8, device=self.device)
        own.set_(self, 0, (self.nbytes(),), (1,))
        return own.clone().untyped_storage()

    def resize_(self: Any, size: int) -> Any:
        if self.device.type != "cuda":
            return resize(self, size)
        holder = torch.empty(0, dtype=torch.uint8, device=self.device)
        holder.set_(self, 0, (0,), (1,))
        ext.resize_storage(holder, int(size))
        return self

    torch.UntypedStorage.resize_ = resize_
    torch.UntypedStorage.clone = clone_
