"""Follow one forward of a model, to find what flows through it: `follow(model, forward, ...)`.

The forward runs as it is, on a real batch, with parameters that are fake tensors: whatever depends
on the batch alone (masks, positions, labels) has values, and the rest has none and takes no time.
Each tensor carries what it was made of, by its memory; a view is made of the same.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
)
from torch.utils._python_dispatch import TorchDispatchMode

from zrun_core.data.batch import map_tensors
from zrun_core.errors import JobError, UserCodeError
from zrun_core.spine.tracebacks import raised_at
from zrun_core.stages.flow import Leaf, ModelFlow, NodeCall, OutsideUse, ParamWrite
from zrun_core.stages.ghosts import run_on_zeros
from zrun_core.stages.left_numbers import LeftNumbers
from zrun_core.stages.node_calls import Node, installed_nodes, walking
from zrun_core.telemetry.flops import FlopCounter
from zrun_core.user_code.asked_gradients import noting_gradients
from zrun_core.user_code.pretrained import config_of
from zrun_core.zero.passes.module_hooks import tensors_in
from zrun_core.zero.wrap.auto_wrap import repeated_blocks
from zrun_core.zero.wrap.fakes import fake_parameters, kept_buffers
from zrun_core.zero.wrap.lookups import users_line

_PP = "parallel.pp"
_COLLECTING = ("output_router_logits", "output_hidden_states", "output_attentions")


def follow(
    model: nn.Module,
    forward: Callable[[], object],
    dtype: torch.dtype,
    device: torch.device,
) -> ModelFlow:
    """Run one forward of `model` without its values, and return what flows through it.

    Args:
        model: the user's, on any device, not sharded, with all of its blocks.
        forward: runs the loss of a batch, with autocast as in training.

    Raises:
        JobError: the model has no repeated blocks, calls one of them twice, or looks at values.
    """
    blocks = repeated_blocks(model)
    if not blocks:
        raise JobError(
            f"{_PP}: the model has no repeated blocks (two members of one class in a ModuleList or "
            "Sequential, with modules inside) to make stages of; write pp: 1"
        )
    names = {id(param): name for name, param in model.named_parameters()}
    installed = installed_nodes(model, blocks)
    fake = fake_parameters(model, dtype, device)
    try:
        with installed, kept_buffers(model), fake as fakes:
            params = {fake.untyped_storage()._cdata: names[key] for key, fake in fakes.items()}
            walk = _FollowingWalk(params, model)
            with walking(walk), walk, walk.left.noting_writes(), noting_gradients() as asked:
                loss = forward()
            walk.end(loss, model)
            if walk.left.is_any_written:
                _refuse_numbers_left(walk, forward)
    except (UserCodeError, RuntimeError, TypeError, ValueError) as error:
        raise _without_values(error) from error
    flow = walk.flow(list(names.values()), [name for name, _ in blocks])
    return replace(flow, collecting=_collecting(model), differentiates=next(iter(asked), ""))


class Calls(NamedTuple):
    """The calls of nodes in a forward.

    Attributes:
        names: of the nodes, in order.
        error: with which the forward failed; None: it came to its end.
    """

    names: Sequence[str]
    error: Exception | None


def calls_of(
    model: nn.Module, forward: Callable[[], object], dtype: torch.dtype, device: torch.device
) -> Calls:
    """Run one forward of `model` without its values, and return which nodes it calls.

    Args:
        model, forward, dtype, device: as of `follow`.
    """
    reading = _ReadingWalk()
    error: Exception | None = None
    with (
        installed_nodes(model, repeated_blocks(model)),
        kept_buffers(model),
        fake_parameters(model, dtype, device),
        walking(reading),
    ):
        try:
            forward()
        except Exception as failure:
            error = failure
    return Calls(reading.names, error)


def _collecting(model: nn.Module) -> str:
    """Return the setting by which a model of transformers collects what its blocks make inside.

    With that of its routers the loss has a part that balances experts.
    """
    for name, module in model.named_modules():
        config = config_of(module)
        for key in _COLLECTING:
            if getattr(config, key, None) is True:
                return ".".join(filter(None, ("model", name, "config", key)))
    return ""


def _refuse_numbers_left(walk: _FollowingWalk, forward: Callable[[], object]) -> None:
    """Run one forward more.

    Raises:
        JobError: a number that a node has left as an attribute is read outside of it.
    """
    reading = _ReadingWalk()
    walk.left.is_in_node = lambda: reading.is_in_node
    with walking(reading), walk.left.noting_reads():
        forward()
    if walk.left.first_read:
        raise JobError(
            f"{_PP}: a block writes a number to {walk.left.first_read}, which is read outside of "
            "it, where a stage has those of its own blocks alone: return it from the block as a "
            "tensor, or write pp: 1"
        )


class _ReadingWalk:
    """Knows while a node runs, and the names of those that have run."""

    is_in_node = False

    def __init__(self) -> None:
        self.names: list[str] = []

    def call(self, node: Node, args: Any, kwargs: dict[str, Any]) -> Any:
        self.names.append(node.name)
        if node.is_block:
            _refuse_collected()
        self.is_in_node = True
        try:
            return node.run(args, kwargs)
        except RuntimeError as error:
            return run_on_zeros(node, lambda *a, **k: node.run(a, k), args, kwargs, error)
        finally:
            self.is_in_node = False


def _refuse_collected() -> None:
    """Refuse that a model of transformers notes what its layers return, by hooks on them.

    A stage has no result of a block that is elsewhere until something asks for it.

    Raises:
        JobError: it does in the forward that is under way.
    """
    capturing: Any = sys.modules.get("transformers.utils.output_capturing")
    collector = getattr(capturing, "_active_collector", None)
    collected = (collector.get() if collector is not None else None) or {}
    for key in ("hidden_states", "attentions", "cross_attentions"):
        if key in collected:
            raise JobError(
                f"{_PP}: the forward asks for what all layers return (output_{key}), and a stage "
                f"has that of its own blocks alone: leave it out of the call, write "
                f"model.config.output_{key} = False where the model is made, or pp: 1"
            )


def _without_values(error: Exception) -> JobError:
    """Return what to say of a forward that failed without the values of its parameters."""
    cause = error.__cause__ if isinstance(error, UserCodeError) else error
    if isinstance(cause, DataDependentOutputException | DynamicOutputShapeException):
        place = raised_at(cause)
        at = f" ({place})" if place is not None else ""
        return JobError(
            f"{_PP}: the model's forward looks at values of hidden states outside of its blocks, "
            "as .item(), nonzero() and indices that are masks do, and a stage has those of its own "
            f"blocks alone: compute without looking, as with torch.where, or write pp: 1{at}"
        )
    return JobError(
        f"{_PP}: a forward without the values of the parameters, by which the model is cut into "
        f"stages, failed: if it runs with pp: 1, write that; this model needs them\n{error}"
    )


class _Source(NamedTuple):
    """Origin of a tensor: a leaf, or a parameter that is used outside of nodes.

    Attributes:
        call, number: of a leaf, as of `Leaf`.
        param: name of a parameter, else empty.
        segment: in which the parameter is used.
    """

    call: int = -1
    number: int = -1
    param: str = ""
    segment: int = -1


_Sources = frozenset[_Source]
_NONE: _Sources = frozenset()


class _FollowingWalk(TorchDispatchMode):
    """Follows the tensors of one forward, by their memory: views are made of the same."""

    def __init__(self, params: Mapping[int, str], model: nn.Module) -> None:
        """Watch a forward of `model`. `params` has the name of a parameter by its storage."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.left = LeftNumbers(model, lambda: self._running is not None)
        self._params = params
        self._blocks: list[str] = []
        self._calls: list[NodeCall] = []
        self._running: int | None = None  # number of the call that runs
        self._counter = FlopCounter()
        self._flops: defaultdict[int, float] = defaultdict(float)
        self._uses: dict[str, set[int]] = defaultdict(set)
        self._made_of: dict[int, _Sources] = {}  # by storage
        self._alive: list[object] = []  # so that no storage has the identity of an earlier one
        self._used_in: dict[_Source, set[int]] = defaultdict(set)
        self._leaves: dict[_Source, torch.Tensor] = {}
        self._handed_out: dict[int, set[_Source]] = {}  # by storage, the leaves that it holds
        self._written: dict[_Source, int] = {}  # the first segment that does
        self._params_written: dict[str, ParamWrite] = {}
        self._buffers: dict[str, int] = {}  # by name, the storage; of those that have one
        for name, buffer in model.named_buffers(remove_duplicate=False):
            self._buffers[name] = self._storage(buffer)
        self._buffer_storages = set(self._buffers.values())
        self._changed: set[int] = set()  # storages of buffers that nodes write to
        self._buffers_changed: tuple[str, ...] = ()
        self._has_grad = torch.is_grad_enabled()
        self._segment = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled in here

    def call(self, node: Node, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run a node, and note what it hands out."""
        number = len(self._calls)
        self._calls.append(NodeCall(node.name, self._segment))
        if node.is_block:
            if node.name in self._blocks:
                raise JobError(
                    f"{_PP}: {node.name} is called twice in a forward, so it would be on two "
                    "stages; write pp: 1"
                )
            self._blocks.append(node.name)
            _refuse_collected()
            self._check_gradients(node, args, kwargs)
        for param in node.module.parameters():  # also those that this batch does without
            name = self._params[self._storage(param)]
            self._uses[name].add(self._segment)
        self._running = number
        try:
            with self.left.noting_changes(node.module):
                output = self._run_on_fakes(node, args, kwargs)
        finally:
            self._running = None
        if _hands_on(args, kwargs, output):
            self._calls[number] = replace(self._calls[number], hands_on=True)
        found: dict[int, set[_Source]] = defaultdict(set)
        for place, tensor in enumerate(tensors_in(output)):
            leaf = _Source(number, place)
            found[self._storage(tensor)].add(leaf)
            self._leaves[leaf] = tensor
        self._made_of |= {storage: frozenset(leaves) for storage, leaves in found.items()}
        self._handed_out |= found
        if node.is_block:
            self._segment += 1
        return output

    def _run_on_fakes(self, node: Node, args: Any, kwargs: dict[str, Any]) -> Any:
        try:
            return node.run(args, kwargs)
        except RuntimeError as error:
            return self._run_on_zeros(node, args, kwargs, error)

    def _run_on_zeros(
        self, node: Node, args: Any, kwargs: dict[str, Any], error: RuntimeError
    ) -> Any:
        """Run a node that cannot do without values, on zeros; return fake tensors."""
        param = next(node.module.parameters())
        assert isinstance(param, FakeTensor)
        mode = param.fake_mode

        def call(*zeros: Any, **named_zeros: Any) -> Any:
            given = tensors_in((args, kwargs))
            for tensor, zero in zip(given, tensors_in((zeros, named_zeros)), strict=True):
                made_of = self._made_of.get(self._storage(tensor), _NONE)
                self._made_of[self._storage(zero)] = made_of
            return node.run(zeros, named_zeros)

        def as_fake(tensor: torch.Tensor) -> torch.Tensor:
            fake: torch.Tensor = mode.from_tensor(tensor.detach())
            return fake.requires_grad_().clone() if tensor.requires_grad else fake

        return map_tensors(as_fake, run_on_zeros(node, call, args, kwargs, error))

    def _check_gradients(self, block: Node, args: Any, kwargs: dict[str, Any]) -> None:
        """Check that a block whose gradients are wanted runs with them.

        Raises:
            JobError: it runs without, as in a reentrant checkpoint.
        """
        if torch.is_grad_enabled() or not self._has_grad:
            return
        tensors = [*block.module.parameters(), *tensors_in((args, kwargs))]
        if any(tensor.requires_grad for tensor in tensors):
            raise JobError(
                f"{_PP}: {block.name} runs without gradients, as in a checkpoint with "
                "use_reentrant=True, where no stage can end: write use_reentrant=False, or "
                "activations.checkpoint: full in place of the model's own checkpoints"
            )

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        self._flops[self._segment] += self._counter.of(func, args, kwargs, out)
        sources = _NONE
        for tensor in tensors_in((args, kwargs)):
            storage = self._storage(tensor)
            name = self._params.get(storage)
            if name is not None:
                self._uses[name].add(self._segment)
                if self._running is None:
                    sources |= {_Source(param=name, segment=self._segment)}
            sources |= self._made_of.get(storage, _NONE)
        if self._running is not None:
            for source in sources:
                if source.call != self._running:
                    self._used_in[source].add(self._segment)
            sources = frozenset([_Source(self._running)])
        written = [args[0]] if func._schema.is_mutable and args else []
        self._note_changes(func, args)
        for tensor in tensors_in(written):
            storage = self._storage(tensor)
            if storage in self._params:
                place = ParamWrite(users_line(), is_in_node=self._running is not None)
                self._params_written.setdefault(self._params[storage], place)
            self._add(storage, sources)
            for leaf in self._handed_out.get(storage, ()):
                self._written.setdefault(leaf, self._segment)
        for tensor in tensors_in(out):
            storage = self._storage(tensor)
            if storage not in self._made_of:  # else it is a view, or was written
                self._add(storage, sources)
        return out

    def _note_changes(self, func: Any, args: Any) -> None:
        """Note to which buffers an operation writes, if it is one of a node."""
        if self._running is None:
            return
        if "batch_norm" in func._schema.name:  # which does not tell of running statistics
            written = tensors_in(args)
        elif func._schema.is_mutable:
            written = tensors_in(args[:1])
        else:
            return
        self._changed |= self._buffer_storages & set(map(self._storage, written))

    def _add(self, storage: int, sources: _Sources) -> None:
        if storage not in self._params:
            self._made_of[storage] = self._made_of.get(storage, _NONE) | sources

    def _storage(self, tensor: torch.Tensor) -> int:
        storage = tensor.untyped_storage()
        self._alive.append(storage)
        address: int = storage._cdata
        return address

    def end(self, result: object, model: nn.Module) -> None:
        """End the forward of `model`, whose result is used after the last block."""
        now = dict(model.named_buffers(remove_duplicate=False))
        self._buffers_changed = tuple(
            name
            for name, storage in self._buffers.items()
            if storage in self._changed or name not in now or self._storage(now[name]) != storage
        )
        for tensor in tensors_in(result):
            for source in self._made_of.get(self._storage(tensor), _NONE):
                self._used_in[source].add(self._segment)

    def flow(self, params: Sequence[str], blocks: Sequence[str]) -> ModelFlow:
        """Return what was seen.

        Raises:
            JobError: a block was not called.
        """
        for name in blocks:
            if name not in self._blocks:
                raise JobError(f"{_PP}: {name} is not called in a forward; write pp: 1")
        leaves = []
        outside = []
        for source, used_in in sorted(self._used_in.items()):
            if source.param:
                outside.append(OutsideUse(source.param, source.segment, tuple(sorted(used_in))))
                continue
            tensor = self._leaves.get(source)
            leaves.append(
                Leaf(
                    source.call,
                    source.number,
                    self._calls[source.call].segment,
                    max(used_in),
                    () if tensor is None else tuple(tensor.shape),
                    "float32" if tensor is None else str(tensor.dtype).removeprefix("torch."),
                    tensor is not None and tensor.requires_grad,
                    self._written.get(source),
                )
            )
        return ModelFlow(
            tuple(self._blocks),
            tuple(self._flops[segment] for segment in range(len(self._blocks) + 1)),
            {name: tuple(sorted(self._uses.get(name, ()))) for name in params},
            tuple(self._calls),
            tuple(leaves),
            tuple(outside),
            self._counter.note,
            written=self._params_written,
            changed=self._buffers_changed,
        )


def _first_tensor(args: Any, kwargs: Mapping[str, Any]) -> torch.Tensor | None:
    """Return the first tensor that a call is given, itself and not inside of anything."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor):
            return value
    return None


def _hands_on(args: Any, kwargs: Mapping[str, Any], output: Any) -> bool:
    first = _first_tensor(args, kwargs)
    if first is None or not isinstance(output, torch.Tensor):
        return False
    return output.shape == first.shape and output.dtype == first.dtype
