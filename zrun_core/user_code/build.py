"""Build the user's model once per host, bit for bit as a plain loop builds it.

    host's first rank              the other ranks of the host
    factory()                      factory() on the meta device: the structure alone
    parameters, buffers -> file    map the file
    forget the values              read the values of their shards

The factory really runs on the first rank, whatever it does to its parameters: own generators,
numpy, in-place scaling, `load_state_dict`. Each rank then reads its shards unit by unit, so the
host holds one copy of the model in reclaimable page cache, never one per rank. With `init: meta` it
holds none: see `meta_init.py`.
"""

from __future__ import annotations

import json
import os
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.parameter import UninitializedParameter

from zrun_core.distributed.comm import Comm
from zrun_core.distributed.transport import Group
from zrun_core.errors import PeerError, PreflightError, UserCodeError
from zrun_core.sizes import format_size
from zrun_core.spine.releases import check_release
from zrun_core.user_code.on_meta import on_meta
from zrun_core.user_code.pretrained import outermost

Factory = Callable[[], nn.Module]
Read = Callable[[str, nn.Parameter], torch.Tensor]

_ALIGN = 64  # of a tensor in the file
_PAGE = 4096


@dataclass(frozen=True)
class Built:
    """A model whose parameters are to be read one by one. Its buffers and all else are complete.

    Attributes:
        module: the user's module; its parameters may be on the meta device, or without memory.
        read: full value of a parameter, [shape]; each is asked for once.
        notes: what the user should know about how it was built.
    """

    module: nn.Module
    read: Read
    notes: tuple[str, ...] = ()


def check(module: nn.Module) -> None:
    """Refuse what flat units cannot hold.

    Raises:
        UserCodeError: a parameter without a shape, or that is not a floating-point number; or no
            parameters.
        PreflightError: it is of a release of transformers that is too old.
    """
    release = getattr(sys.modules.get("transformers"), "__version__", None)
    if release is not None and outermost(module) is not None:
        check_release("transformers", release)
    params = list(module.named_parameters())
    for name, param in params:
        if isinstance(param, UninitializedParameter):
            raise UserCodeError(
                f"parameter {name} has no shape yet: run a sample through the model in its factory"
            )
        if not param.is_floating_point():
            raise UserCodeError(
                f"parameter {name} is {param.dtype}: parameters must be floating; make it a buffer"
            )
    if not params:
        raise UserCodeError(
            "the model has no parameters: torch sees no modules in plain lists and dicts; "
            "write nn.ModuleList or nn.ModuleDict, and nn.Parameter for tensors"
        )


def check_trained(module: nn.Module) -> None:
    """Refuse a model of which nothing is to be trained.

    Raises:
        UserCodeError: it is frozen.
    """
    params = list(module.parameters())
    if not any(param.requires_grad for param in params):
        raise UserCodeError(
            f"the model has nothing to train: none of its {len(params)} parameters requires a "
            "gradient"
        )


def build_once_per_host(
    factory: Factory,
    seed: int,
    path: Path,
    host: Group,
    comm: Comm,
    *,
    values: bool = True,
    host_bytes: int | None = None,
    check_states: Callable[[nn.Module], None] | None = None,
) -> Built:
    """Run `factory` on the first rank of `host` and share what it made through a file.

    Args:
        factory: makes the user's module; called once on each rank.
        seed: of torch's generator when the factory begins.
        path: of the file, in a folder that all ranks of the host see. It is gone afterwards.
        values: False if the parameters get their values from elsewhere; nothing is copied then.
        host_bytes: what the parameters may take on this host; None: what they like.
        check_states: called with the structure, on meta, on all ranks of the host but the first,
            while that one still makes the values. Raises PreflightError to refuse it.

    Raises:
        UserCodeError: the factory failed, or builds different structures on different ranks.
        PeerError: it failed on another rank.
        PreflightError: the parameters take more than `host_bytes`, or `check_states` refused.
    """
    torch.manual_seed(seed)
    is_first = host.index == 0
    if host.size == 1:
        with _bounded(host_bytes):
            module = factory()
        check(module)
        return Built(module, _own_values if values else no_value)
    notes: tuple[str, ...] = ()
    try:
        with _together(host, comm):
            if is_first:
                with _bounded(host_bytes):
                    module = factory()
                check(module)
                _write(module, path, values)
            else:
                module, notes = _build_structure(factory, seed)
                if check_states is not None:
                    check_states(module)
        with _together(host, comm):
            stored = _Stored(path)
            stored.check_structure(module)
    finally:
        if is_first:
            path.unlink(missing_ok=True)  # the ranks that have mapped it keep it
    if is_first:
        _forget_values(module)
    else:
        stored.fill_buffers(module)
    if not values:
        return Built(module, no_value, notes)
    return Built(module, lambda name, param: stored.tensor(f"param {name}"), notes)


def _own_values(name: str, param: nn.Parameter) -> torch.Tensor:
    return param.detach()


def no_value(name: str, param: nn.Parameter) -> torch.Tensor:
    """Return a stand-in for a parameter that gets its value from elsewhere."""
    return torch.empty(param.shape, device="meta")


@contextmanager
def _together(host: Group, comm: Comm) -> Iterator[None]:
    """Fail on every rank of `host` where the body fails on one, so that nobody waits in vain."""
    error: BaseException | None = None
    try:
        yield
    except PreflightError:
        # Not told to the others: they may be busy filling the memory. This rank's end ends them.
        raise
    except BaseException as caught:  # told to the others before it is raised
        error = caught
    failures = torch.zeros(host.size, device=comm.device)
    if error is not None:
        failures[host.index] = 1
    told = comm.read(comm.all_reduce_small(failures, host, name="build"))
    failed = [index for index, count in enumerate(told) if count]
    if error is not None:
        raise error
    if failed:
        raise PeerError(f"the model could not be built on rank {host.ranks[failed[0]]}")


@contextmanager
def _bounded(host_bytes: int | None) -> Iterator[None]:
    """Stop a factory once the parameters that it has made take more than `host_bytes`.

    A module registers a parameter when it has made it, so at most one more than fits has been
    allocated by then. What the factory has dropped again does not count.

    Raises:
        PreflightError: they take more.
    """
    if host_bytes is None:
        yield
        return
    made: dict[int, weakref.ref[nn.Parameter]] = {}  # by id
    num_bytes = 0

    def on_registration(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        nonlocal num_bytes
        if not _has_memory(param):
            return
        made[id(param)] = weakref.ref(param)
        num_bytes += param.nbytes
        if num_bytes <= host_bytes:
            return
        # Up to here it counts shared parameters twice, and those that are gone.
        alive = [param for ref in made.values() if (param := ref()) is not None]
        num_bytes = sum(param.nbytes for param in alive)
        if num_bytes > host_bytes:
            raise PreflightError(
                f"the model's parameters take {format_size(num_bytes)} and more as its factory "
                f"builds them, and this host has room for {format_size(host_bytes)}: write "
                "init: meta, which never holds them whole; zrun estimate says what fits"
            )

    handle = register_module_parameter_registration_hook(on_registration)
    try:
        yield
    finally:
        handle.remove()


def _has_memory(param: nn.Parameter | None) -> TypeGuard[nn.Parameter]:
    """Return whether a parameter takes memory of the host."""
    if param is None or isinstance(param, UninitializedParameter):
        return False
    return param.device.type == "cpu"


def _build_structure(factory: Factory, seed: int) -> tuple[nn.Module, tuple[str, ...]]:
    """Build the module on the meta device.

    Returns:
        the module, and a note if it had to be built for real: its factory looks at values, or keeps
        tensors outside of modules.
    """
    try:
        with on_meta():
            module = factory()
        strays = [name for name, inner in module.named_modules() if _holds_meta(vars(inner))]
        reason = ""
        if strays:
            reason = f"module {strays[0] or 'model'} keeps tensors that are no buffers"
    except UserCodeError as error:
        reason = f"it cannot run on the meta device ({str(error).splitlines()[-1].strip()})"
    if reason:
        torch.manual_seed(seed)
        module = factory()
        return module, (f"the model factory runs on every rank: {reason}",)
    check(module)
    return module, ()


_REGISTERED = ("_parameters", "_buffers", "_modules")  # what a module knows of


def _holds_meta(value: Any, depth: int = 0) -> bool:
    """Return whether a meta tensor that is neither parameter nor buffer hides in `value`.

    `value` is the attributes of a module, or what is in one of them, `depth` levels below the
    module.
    """
    if isinstance(value, torch.Tensor):
        return value.device.type == "meta"
    if depth > 3:
        return False
    inner: Iterable[Any] = ()
    if isinstance(value, dict):
        inner = (item for key, item in value.items() if depth or key not in _REGISTERED)
    elif isinstance(value, list | tuple):
        inner = (item for item in value if not isinstance(item, nn.Parameter))
    return any(_holds_meta(item, depth + 1) for item in inner)


def _tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for name, param in module.named_parameters():
        yield f"param {name}", param.detach()
    for name, buffer in module.named_buffers():
        yield f"buffer {name}", buffer


def _write(module: nn.Module, path: Path, values: bool) -> None:
    """Write all parameters and buffers, contiguous, after a header of (name, dtype, shape, offset).

        8 bytes   length of the header, little endian
        header    JSON
        tensors   from the next page on, each at a multiple of 64 bytes from there

    Without `values` the file has holes where the parameters would be, which take no room.
    """
    header = []
    offset = 0
    for name, tensor in _tensors(module):
        header.append((name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), offset))
        offset += -(-tensor.nbytes // _ALIGN) * _ALIGN
    head = json.dumps(header).encode()
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(len(head).to_bytes(8, "little") + head)
        start = -(-file.tell() // _PAGE) * _PAGE
        for (_, _, _, at), (name, tensor) in zip(header, _tensors(module), strict=True):
            if tensor.numel() and (values or name.startswith("buffer ")):
                file.seek(start + at)
                file.write(tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
        file.truncate(max(start + offset, file.tell(), start + 1))


class _Stored:
    """The file that `_write` wrote, mapped."""

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            self._entries = {
                name: (dtype, shape, at) for name, dtype, shape, at in json.loads(file.read(size))
            }
        start = -(-(8 + size) // _PAGE) * _PAGE
        self._bytes = torch.from_file(
            str(path), shared=True, size=path.stat().st_size, dtype=torch.uint8
        )[start:]

    def tensor(self, name: str) -> torch.Tensor:
        dtype_name, shape, at = self._entries[name]
        dtype = getattr(torch, dtype_name)
        numel = torch.Size(shape).numel()
        return self._bytes[at : at + numel * dtype.itemsize].view(dtype).view(shape)

    def check_structure(self, module: nn.Module) -> None:
        """Refuse a module that has other names or shapes than the first rank's.

        Raises:
            UserCodeError: the first tensor in which they differ.
        """
        here = {name: list(tensor.shape) for name, tensor in _tensors(module)}
        first = {name: shape for name, (_, shape, _) in self._entries.items()}
        for name in {**here, **first}:
            if here.get(name) != first.get(name):
                raise UserCodeError(
                    f"the model factory builds different models on different ranks: {name} has "
                    f"shape {here.get(name, 'none')} here and {first.get(name, 'none')} on the "
                    "host's first rank"
                )

    def fill_buffers(self, module: nn.Module) -> None:
        """Give the module the first rank's buffers; one that is shared stays shared."""
        values: dict[int, torch.Tensor] = {}
        names = {id(buffer): name for name, buffer in module.named_buffers()}
        for inner in module.modules():
            for key, buffer in inner._buffers.items():
                if buffer is None:
                    continue
                if id(buffer) not in values:
                    stored = self.tensor(f"buffer {names[id(buffer)]}")
                    # In place where there is memory: an attribute may be the same tensor.
                    values[id(buffer)] = stored.clone() if buffer.is_meta else buffer.copy_(stored)
                inner._buffers[key] = values[id(buffer)]


def _forget_values(module: nn.Module) -> None:
    """Free the parameters' memory. They keep identity, shape, stride, hooks and attributes."""
    for param in list(module.parameters()):
        hollow = torch.empty_strided(param.shape, param.stride(), dtype=param.dtype)
        hollow.untyped_storage().resize_(0)
        param.data = hollow
