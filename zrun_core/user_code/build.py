"""Build the user's model once per host, bit for bit as a plain loop builds it.

The factory really runs on the host's first rank, whatever it does to its parameters: own generators, numpy, in-place
scaling, `load_state_dict`. The values go to a file that the host's other ranks map; they run the factory on the meta
device for the structure alone. Each rank then reads its shards unit by unit, so the host holds one copy of the model in
reclaimable page cache, never one per rank. `init: meta` holds none: every module resets itself, seeded by its number.

The structure tells within a moment what the values will take, which may be more than there is. A rank that is alone on
its host has a copy of its process look at it.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter
from torch.overrides import TorchFunctionMode

from zrun_core.distributed.comm import Comm, Group
from zrun_core.distributed.rng import mix
from zrun_core.errors import JobError, PeerError, PreflightError, UserCodeError
from zrun_core.spine import memory_limits
from zrun_core.spine.sizes import format_size

Factory = Callable[[], nn.Module]
Read = Callable[[str, nn.Parameter], torch.Tensor]

_ALIGN = 64
_LOOK_BYTES = 1 << 30  # that looking at a structure may take


@dataclass(frozen=True)
class Built:
    """A model whose parameters are to be read one by one. Buffers and everything else are complete.

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
        UserCodeError: a parameter without a shape, or that is not a floating-point number; or nothing to train.
    """
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
    if not any(param.requires_grad for _, param in params):
        if not params:
            raise UserCodeError(
                "the model has no parameters: torch sees no modules in plain lists and dicts; "
                "write nn.ModuleList or nn.ModuleDict, and nn.Parameter for tensors"
            )
        raise UserCodeError(
            f"the model has nothing to train: none of its {len(params)} parameters requires a gradient"
        )


def build_once_per_host(
    factory: Factory,
    seed: int,
    path: Path,
    host: Group,
    comm: Comm,
    *,
    values: bool = True,
    memory: int | None = None,
    check_states: Callable[[nn.Module], None] | None = None,
    refuse: Callable[[PreflightError], object] | None = None,
) -> Built:
    """Run `factory` on the first rank of `host` and share what it made through the file at `path`.

    Args:
        values: false: buffers only; the parameters get their values from elsewhere, and nothing is copied for them.
        memory: bytes of the host that may be taken; None: all.
        check_states: raises a `PreflightError` where there is no room for what a rank keeps of a structure.
        refuse: ends a process whose main thread makes values for which there is no room. None: a rank that is alone on
            its host does not look ahead.

    Raises:
        UserCodeError: the factory failed, or builds different structures on different ranks.
        PeerError: it failed on another rank.
        PreflightError: there is less memory than the parameters or the states take.
    """

    def look(structure: nn.Module) -> None:
        check_room(structure, min(memory_limits.host_total(), memory or memory_limits.host_total()))
        if check_states is not None:
            check_states(structure)

    torch.manual_seed(seed)
    if host.size == 1:
        with nullcontext() if refuse is None else _looking_ahead(factory, look, refuse):
            module = factory()
        check(module)
        return Built(module, (lambda name, param: param.detach()) if values else _no_value)
    is_first = host.index == 0
    notes: tuple[str, ...] = ()
    try:
        with _together(host, comm):
            if is_first:
                module = factory()
                check(module)
                _write(module, path, values)
            else:
                module, notes = _build_structure(factory, seed)
                look(module)
        with _together(host, comm):
            stored = _Stored(path)
            stored.check_structure(module)
    finally:
        if is_first:
            path.unlink(missing_ok=True)  # it lives on for those who have it open
    if is_first:
        _forget_values(module)
    else:
        stored.fill_buffers(module)
    return Built(
        module, (lambda name, param: stored.tensor(f"param {name}")) if values else _no_value, notes
    )


def _no_value(name: str, param: nn.Parameter) -> torch.Tensor:
    return torch.empty(param.shape, device="meta")


@contextmanager
def _together(host: Group, comm: Comm) -> Iterator[None]:
    """What is done inside succeeds on every rank of `host` or fails on every one, so that nobody waits in vain."""
    error: BaseException | None = None
    try:
        yield
    except (
        PreflightError
    ):  # the end of this rank is the end of all: the first one must not go on filling the memory
        raise
    except BaseException as caught:  # told to the others before it is raised
        error = caught
    failures = torch.zeros(host.size, device=comm.device)
    failures[host.index] = error is not None
    failed = comm.all_reduce_small(failures, host, name="build").nonzero().flatten().tolist()
    if error is not None:
        raise error
    if failed:
        raise PeerError(f"the model could not be built on rank {host.ranks[failed[0]]}")


def _build_structure(factory: Factory, seed: int) -> tuple[nn.Module, tuple[str, ...]]:
    """The module on meta; for real, with a note, if the factory looks at values or keeps tensors outside of modules."""
    try:
        with torch.device("meta"):
            module = factory()
        strays = [name for name, inner in module.named_modules() if _holds_meta(vars(inner))]
        reason = (
            f"module {strays[0] or 'model'} keeps tensors that are no buffers" if strays else ""
        )
    except UserCodeError as error:
        reason = f"it cannot run on the meta device ({str(error).splitlines()[-1].strip()})"
    if reason:
        torch.manual_seed(seed)
        module = factory()
        return module, (f"the model factory runs on every rank: {reason}",)
    check(module)
    return module, ()


def check_room(module: nn.Module, host_bytes: int) -> None:
    """What the structure alone tells, while the first rank still makes the values.

    Raises:
        PreflightError: no host of `host_bytes` can hold the parameters that the factory makes there.
    """
    needed = sum(param.numel() * param.element_size() for param in module.parameters())
    if needed > host_bytes:
        raise PreflightError(
            f"the model's parameters take {format_size(needed)} as its factory builds them, and this host has room for "
            f"{format_size(host_bytes)}: write init: meta, which never holds them whole; zrun estimate says what fits"
        )


@contextmanager
def _looking_ahead(
    factory: Factory, look: Callable[[nn.Module], None], refuse: Callable[[PreflightError], object]
) -> Iterator[None]:
    """What runs inside is ended by `refuse` once a copy of this process finds that it can come to no good end.

    The copy runs the factory too, on the meta device. It is another process because a factory may count, draw random
    numbers or keep what it makes: what this one builds is as if nobody had looked.
    """
    read_fd, write_fd = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", DeprecationWarning
        )  # other threads: the copy needs none of them
        child = os.fork()
    if not child:
        _look_and_exit(factory, look, write_fd)
    os.close(write_fd)

    def listen() -> None:
        with open(read_fd, "rb") as answer:
            reason = answer.read()
        if reason:
            refuse(PreflightError(reason.decode()))

    listener = threading.Thread(target=listen, name="zrun-look", daemon=True)
    listener.start()
    try:
        yield
    finally:
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        with suppress(ChildProcessError):
            os.waitpid(child, 0)
        listener.join()


def _look_and_exit(factory: Factory, look: Callable[[nn.Module], None], answer: int) -> NoReturn:
    """The copy. Whatever fails in it fails in the original too, which says so."""
    try:
        if sys.platform.startswith("linux"):
            ctypes.CDLL(None).prctl(
                1, signal.SIGKILL
            )  # PR_SET_PDEATHSIG: others wait for the end of its connections
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        memory_limits.limit_growth(_LOOK_BYTES)  # where the factory makes values all the same
        sys.stdout = sys.stderr = nothing = open(os.devnull, "w")  # noqa: SIM115  # what it prints is printed once
        for stream in (1, 2):
            os.dup2(nothing.fileno(), stream)
        with torch.device("meta"):
            structure = factory()
        check(structure)
        look(structure)
    except PreflightError as error:
        os.write(answer, str(error).encode())
    finally:
        os._exit(0)


def _holds_meta(value: Any, depth: int = 0) -> bool:
    """Whether a meta tensor that is neither parameter nor buffer hides in a module's attributes."""
    if isinstance(value, torch.Tensor):
        return value.device.type == "meta"
    if depth > 3:
        return False
    if isinstance(value, dict):
        known = ("_parameters", "_buffers", "_modules")
        return any(
            _holds_meta(item, depth + 1) for key, item in value.items() if depth or key not in known
        )
    if isinstance(value, list | tuple):
        return any(
            _holds_meta(item, depth + 1) for item in value if not isinstance(item, nn.Parameter)
        )
    return False


def _tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for name, param in module.named_parameters():
        yield f"param {name}", param.detach()
    for name, buffer in module.named_buffers():
        yield f"buffer {name}", buffer


def _write(module: nn.Module, path: Path, values: bool) -> None:
    """All parameters and buffers, contiguous, after a header of (name, dtype, shape, offset).

    Without `values` the file has holes where the parameters would be, which take no room.
    """
    header, offset = [], 0
    for name, tensor in _tensors(module):
        header.append((name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), offset))
        offset += -(-tensor.numel() * tensor.element_size() // _ALIGN) * _ALIGN
    head = json.dumps(header).encode()
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(len(head).to_bytes(8, "little") + head)
        start = -(-file.tell() // 4096) * 4096
        for (_, _, _, at), (name, tensor) in zip(header, _tensors(module), strict=True):
            if tensor.numel() and (values or name.startswith("buffer ")):
                file.seek(start + at)
                file.write(tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
        file.truncate(max(start + offset, file.tell(), start + 1))


class _Stored:
    """What `_write` wrote, mapped."""

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            self._entries = {
                name: (dtype, shape, at) for name, dtype, shape, at in json.loads(file.read(size))
            }
        start = -(-(8 + size) // 4096) * 4096
        self._bytes = torch.from_file(
            str(path), shared=True, size=path.stat().st_size, dtype=torch.uint8
        )[start:]

    def tensor(self, name: str) -> torch.Tensor:
        dtype_name, shape, at = self._entries[name]
        dtype = getattr(torch, dtype_name)
        numel = torch.Size(shape).numel()
        return self._bytes[at : at + numel * dtype.itemsize].view(dtype).view(shape)

    def check_structure(self, module: nn.Module) -> None:
        found = {name: list(tensor.shape) for name, tensor in _tensors(module)}
        expected = {name: shape for name, (_, shape, _) in self._entries.items()}
        if found != expected:
            names = [
                name for name in {**found, **expected} if found.get(name) != expected.get(name)
            ]
            raise UserCodeError(
                f"the model factory builds different models on different ranks: {names[0]} has shape "
                f"{found.get(names[0], 'none')} here and {expected.get(names[0], 'none')} on the host's first rank"
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
    """Free the parameters' memory. They keep their identity, shape, stride, hooks and attributes."""
    for param in list(module.parameters()):
        hollow = torch.empty_strided(param.shape, param.stride(), dtype=param.dtype)
        hollow.untyped_storage().resize_(0)
        param.data = hollow


# init: meta


def build_on_meta(factory: Factory, seed: int, *, values: bool = True) -> Built:
    """Build the structure only; each module's own `reset_parameters` makes its values when they are asked for.

    Args:
        values: false: the parameters get their values from elsewhere.

    Raises:
        JobError: modules that cannot reset themselves, or a factory that changes parameters after building them.
    """
    torch.manual_seed(seed)
    watch = _WatchWrites()
    try:
        with torch.device("meta"), watch:
            module = factory()
    except UserCodeError as error:
        raise JobError(
            f"init: meta: the factory cannot run on the meta device; write init: factory\n{error}"
        ) from None
    check(module)
    for name, param in module.named_parameters():
        if (change := watch.change_of(param)) is not None:
            raise JobError(
                f"init: meta: the factory itself changes parameters ({change} on {name}); {_ADVICE}"
            )
    for name, inner in module.named_modules():
        owns = [*inner.named_parameters(recurse=False), *inner.named_buffers(recurse=False)]
        if owns and not callable(getattr(inner, "reset_parameters", None)):
            raise JobError(
                f"init: meta: {name or 'the model'} ({type(inner).__name__}) has no reset_parameters, so {owns[0][0]} "
                f"would have no value; {_ADVICE}"
            )
        real = [key for key, tensor in owns if tensor.device.type != "meta"]
        if real:
            owner = f"{name}." if name else ""
            raise JobError(
                f"init: meta: {owner}{real[0]} was given values by the factory; {_ADVICE}"
            )
    numbers = {id(inner): number for number, inner in enumerate(module.modules())}
    for inner in module.modules():
        if any(True for _ in inner.buffers(recurse=False)):
            made = _reset(inner, mix(seed, numbers[id(inner)]))
            for key in inner._buffers:
                if key in made:
                    inner._buffers[key] = made[key]
    return Built(module, _ResetOnDemand(module, seed, numbers) if values else _no_value)


_ADVICE = "write init: factory"
_OPERATORS = {"__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__"}
_HARMLESS = {"requires_grad_", "detach_"}


class _WatchWrites(TorchFunctionMode):
    """Notices what is written, outside of `reset_parameters`, to memory that turns out to be a parameter's."""

    def __init__(self) -> None:
        super().__init__()
        # By storage, which the tensor keeps from being reused: writing to `param.data` or to a view counts too.
        self._changes: dict[int, tuple[str, torch.Tensor]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        writes = name in _OPERATORS or (
            name.endswith("_") and not name.endswith("__") and name not in _HARMLESS
        )
        target = args[0] if args else (kwargs or {}).get("tensor")  # nn.init passes it by name
        if (
            writes
            and isinstance(target, torch.Tensor)
            and target.is_meta
            and not _in_module_reset()
        ):
            self._changes.setdefault(target.untyped_storage()._cdata, (name, target.detach()))
        return func(*args, **(kwargs or {}))

    def change_of(self, param: nn.Parameter) -> str | None:
        """What wrote to `param`; None if nothing did."""
        found = self._changes.get(param.untyped_storage()._cdata) if param.is_meta else None
        return found[0] if found is not None else None


def _in_module_reset() -> bool:
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "reset_parameters":
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def _reset(module: nn.Module, seed: int) -> dict[str, torch.Tensor]:
    """Real values of a module's own parameters and buffers, by attribute name. The module itself stays on meta.

    Raises:
        JobError: its `reset_parameters` leaves one of them without a value.
    """
    params, buffers = dict(module._parameters), dict(module._buffers)
    try:
        for key, param in params.items():
            if param is not None:
                module._parameters[key] = nn.Parameter(_unset_like(param), param.requires_grad)
        for key, buffer in buffers.items():
            if buffer is not None:
                module._buffers[key] = _unset_like(buffer)
        with _seeded(seed), torch.device("cpu"):
            module.reset_parameters()  # type: ignore[operator]
        made = {**module._parameters, **module._buffers}
        for key, value in made.items():
            if value is not None and value.isnan().any():
                raise JobError(
                    f"init: meta: {type(module).__name__}.reset_parameters leaves {key} unset; {_ADVICE}"
                )
        return {key: value.detach() for key, value in made.items() if value is not None}
    finally:
        module._parameters.update(params)
        module._buffers.update(buffers)


def _unset_like(tensor: torch.Tensor) -> torch.Tensor:
    """On CPU, of NaN where there is such a number."""
    empty = torch.empty_like(tensor, device="cpu")
    return empty.fill_(float("nan")) if empty.is_floating_point() else empty.zero_()


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    state = torch.get_rng_state()
    torch.manual_seed(seed)
    try:
        yield
    finally:
        torch.set_rng_state(state)


class _ResetOnDemand:
    """Reads parameters of a meta model by resetting their module. One module's values are held at a time."""

    def __init__(self, module: nn.Module, seed: int, numbers: dict[int, int]) -> None:
        self._seed, self._numbers = seed, numbers
        self._owner: dict[str, tuple[nn.Module, str]] = {}
        for prefix, inner in module.named_modules():
            for key, _ in inner.named_parameters(recurse=False):
                self._owner[f"{prefix}.{key}" if prefix else key] = (inner, key)
        self._held: tuple[nn.Module, dict[str, torch.Tensor]] | None = None

    def __call__(self, name: str, param: nn.Parameter) -> torch.Tensor:
        owner, key = self._owner[name]
        if self._held is None or self._held[0] is not owner:
            self._held = None
            self._held = (owner, _reset(owner, mix(self._seed, self._numbers[id(owner)])))
        return self._held[1][key]
