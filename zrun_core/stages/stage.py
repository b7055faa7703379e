"""A stage of a pipeline: the user's own forward, of which this rank computes its chunks.

Every stage runs the whole forward, on its own batch. What depends on the batch alone (masks,
positions, labels) each of them computes; so the hidden states are all that is sent.

    call of a node          of this chunk   runs
                            before it       is a ghost: hands out tensors without values, in whose
                                            place those come that crossed the border
    last block of the chunk                 ends the forward, by an exception: `StageDone`

Tensors without values are fake tensors: no memory, no time, and whatever is made of one has no
value either. So a mistake about what crosses a border cannot become a wrong number.

[Note: parameters of other stages]
They are removed from their modules, as if there were none: nothing of them is gathered, saved or
counted. In their place is an attribute of the same name, a fake tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd.graph import GradientEdge, get_gradient_edge

from zrun_core.data.batch import map_tensors
from zrun_core.errors import UserCodeError
from zrun_core.pipeline.split import Split
from zrun_core.stages.flow import Leaf, ModelFlow, first_tensor
from zrun_core.stages.node_calls import Node, install_nodes, walking
from zrun_core.zero.auto_wrap import repeated_blocks, running_norm_params
from zrun_core.zero.foreign import remove_param
from zrun_core.zero.module_hooks import tensors_in

_PLAIN = (str, bytes, int, float, bool, Enum, torch.dtype, torch.device, type(None))

# Brings a tensor from the stage before, given its place among those that cross and one like it.
Receive = Callable[[int, torch.Tensor], torch.Tensor]


class StageDone(BaseException):
    """Ends a forward whose chunk has run. No user's code should take it for an error."""


class _Arrival(torch.autograd.Function):
    """Gives a tensor that has arrived a place in the graph, and keeps its gradient."""

    @staticmethod
    def forward(
        ctx: Any, begin: torch.Tensor, tensor: torch.Tensor, arrived: Arrived
    ) -> torch.Tensor:
        ctx.arrived = arrived
        return tensor.detach()  # not a view: a block may write to it

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, None, None]:
        ctx.arrived.grad = grad
        return None, None, None


@dataclass(eq=False)
class Arrived:
    """A tensor that has come from the stage before.

    Attributes:
        shape, dtype, device: of it.
        grad: that goes back; None: it got none.
    """

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    grad: torch.Tensor | None = None

    def take_grad(self) -> torch.Tensor:
        """Return the gradient, zeros where nothing has used the tensor."""
        grad = self.grad
        self.grad = None
        if grad is None:
            return torch.zeros(self.shape, dtype=self.dtype, device=self.device)
        return grad.contiguous()


@dataclass
class ChunkPass:
    """A micro-batch's forward through a chunk, until its backward is over.

    Attributes:
        result: what the forward returned; of the last chunk only.
        outputs: what crosses the border after it, in the order of `ModelFlow.crossing`; emptied
            once it is sent.
        edges: places in the graph of those that get a gradient; None: of those that get none.
        arrived: of what has come, by place: what gets a gradient.
    """

    result: Any = None
    outputs: list[torch.Tensor] = field(default_factory=list)
    edges: list[GradientEdge | None] = field(default_factory=list)
    arrived: dict[int, Arrived] = field(default_factory=dict)


class Stage:
    """The chunks of a model that a rank has.

    Attributes:
        flow: of the whole model.
        split: of the whole model.
        index: of the stage.
        chunks: that it has.
        own_blocks: of these chunks.
    """

    def __init__(
        self,
        model: nn.Module,
        flow: ModelFlow,
        split: Split,
        index: int,
        owners: Mapping[str, Sequence[int]],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Make ghosts of what other stages have, in place.

        Args:
            model: the user's, with all of its parameters, and no hooks yet.
            flow: of it.
            split: of it.
            index: of this stage.
            owners: by the first name of a parameter, the stages that have it.
            dtype: that parameters have in training.
            device: that trains.

        Raises:
            JobError: something cannot cross a border.
        """
        self.flow = flow
        self.split = split
        self.index = index
        self.chunks = split.chunks(index)
        self._device = device
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._fakes: dict[int, torch.Tensor] = {}  # of parameters, by identity
        self._begin = torch.empty((), device=device, requires_grad=True)
        self._handed_out: dict[Hashable, Any] = {}  # by ghosts, by what they are given
        self.borders = [
            flow.crossing(split.blocks(chunk).start) for chunk in range(split.num_chunks)
        ]
        self.borders.append(())
        blocks = repeated_blocks(model)
        install_nodes(model, blocks)
        self.own_blocks = [
            model.get_submodule(flow.blocks[number])
            for chunk in self.chunks
            for number in split.blocks(chunk)
        ]
        self._remove_foreign_params(model, owners, dtype)
        self._remove_foreign_buffers(model, dict(blocks))

    def _remove_foreign_params(
        self, model: nn.Module, owners: Mapping[str, Sequence[int]], dtype: torch.dtype
    ) -> None:
        """Remove parameters of other stages. See [Note: parameters of other stages]."""
        in_fp32 = running_norm_params(model)
        names = {id(param): name for name, param in model.named_parameters()}
        for module in model.modules():
            for key, param in list(module._parameters.items()):
                if param is None:
                    continue
                own_dtype = torch.float32 if id(param) in in_fp32 else dtype
                fake = self._fake_like(param, own_dtype)
                if self.index not in owners[names[id(param)]]:
                    remove_param(module, key, fake)

    def _remove_foreign_buffers(self, model: nn.Module, blocks: Mapping[str, nn.Module]) -> None:
        """Remove the buffers of other stages' blocks; others are saved by one stage only.

        What a forward reads outside of nodes every stage keeps.
        """
        here: dict[str, bool] = {}  # by node
        for call in self.flow.calls:
            stage = self.split.stage_of(self.split.chunk_of_segment(call.segment))
            here.setdefault(call.name, stage == self.index)
        for name, module in model.named_modules():
            node = next((n for n in here if name == n or name.startswith(f"{n}.")), None)
            is_saved_here = self.index == 0 if node is None else here[node]
            if is_saved_here:
                continue
            for key, buffer in list(module._buffers.items()):
                if buffer is None:
                    continue
                module._non_persistent_buffers_set.add(key)
                if node in blocks:
                    del module._buffers[key]
                    vars(module)[key] = self._mode.from_tensor(buffer)

    def _fake_like(self, param: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        if id(param) not in self._fakes:
            with self._mode:
                fake = torch.empty_strided(
                    param.shape, param.stride(), dtype=dtype, device=self._device
                )
            self._fakes[id(param)] = fake
        return self._fakes[id(param)]

    def forward(self, chunk: int, call: Callable[[], Any], receive: Receive) -> ChunkPass:
        """Run a micro-batch's forward through a chunk.

        Args:
            chunk: of this stage.
            call: the user's forward, to the loss.
            receive: brings what crosses the border before the chunk.

        Raises:
            UserCodeError: the forward calls other modules than the one that was followed.
        """
        walk = _StageWalk(self, chunk, receive)
        with walking(walk):
            try:
                walk.passed.result = call()
            except StageDone:
                walk.end()
        if chunk == self.split.num_chunks - 1:
            if any(isinstance(tensor, FakeTensor) for tensor in tensors_in(walk.passed.result)):
                raise walk.took_another_way("its result needs what another stage has")
            return walk.passed
        if not walk.is_done:
            raise walk.took_another_way(f"it ended before {self._last_block(chunk)}")
        return walk.passed

    def _last_block(self, chunk: int) -> str:
        return self.flow.blocks[self.split.blocks(chunk).stop - 1]

    def hand_out(self, node: Node, args: Any, kwargs: dict[str, Any], *, hands_on: bool) -> Any:
        """Return what a ghost of `node` hands out: tensors without values.

        Args:
            node: of another chunk.
            args, kwargs: of its call.
            hands_on: as of `NodeCall`.
        """
        first = first_tensor(args, kwargs)
        if hands_on and first is not None:
            return first
        signature: Hashable | None
        try:
            signature = (node.name, node.module.training, _signature((args, kwargs)))
        except TypeError:
            signature = None
        template = self._handed_out.get(signature)
        if signature is None or template is None:
            with torch.no_grad(), self._as_ghost(node):
                template = node.forward(*args, **kwargs)
            if signature is not None:
                self._handed_out[signature] = template
        return map_tensors(lambda tensor: tensor.detach(), template)

    @contextmanager
    def _as_ghost(self, node: Node) -> Iterator[None]:
        """Let a node's own forward run on fake parameters, also where this stage has true ones.

        Modules inside of it run without hooks, and are no nodes.
        """
        changed: list[tuple[nn.Module, str, Any]] = []

        def change(module: nn.Module, key: str, value: Any) -> None:
            changed.append((module, key, vars(module).get(key)))
            vars(module)[key] = value

        for module in node.module.modules():
            if module is not node.module:
                change(module, "_call_impl", module.forward)
            for key in dict.keys(module._parameters):
                param = dict.__getitem__(module._parameters, key)  # without unsharding it
                if param is not None:
                    change(module, key, self._fake_like(param, param.dtype))
        try:
            yield
        finally:
            for module, key, before in changed:
                if before is None:
                    del vars(module)[key]
                else:
                    vars(module)[key] = before

    def arrive(self, tensor: torch.Tensor, leaf: Leaf, passed: ChunkPass, place: int) -> Any:
        """Return a tensor that has come, with a place in the graph if it gets a gradient."""
        if not (leaf.requires_grad and torch.is_grad_enabled()):
            return tensor
        arrived = Arrived(tensor.shape, tensor.dtype, tensor.device)
        passed.arrived[place] = arrived
        return _Arrival.apply(self._begin, tensor, arrived)  # type: ignore[no-untyped-call]


class _StageWalk:
    """A micro-batch's way through one chunk.

    Attributes:
        passed: what is kept of it.
        is_done: the chunk's last block has run.
    """

    def __init__(self, stage: Stage, chunk: int, receive: Receive) -> None:
        self.passed = ChunkPass()
        self.is_done = False
        self._stage = stage
        self._receive = receive
        segments = stage.split.segments(chunk)
        self._segments = segments
        self._is_last = chunk == stage.split.num_chunks - 1
        self._arriving = _places(stage.borders[chunk])
        self._leaving = _places(stage.borders[chunk + 1])
        self._left: dict[int, torch.Tensor] = {}  # what crosses the next border, by place
        self._number = 0  # of the call that comes

    def call(self, node: Node, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run a node of this chunk, or let its ghost hand out what has come."""
        number = self._number
        self._number += 1
        calls = self._stage.flow.calls
        if number >= len(calls) or calls[number].name != node.name:
            expected = calls[number].name if number < len(calls) else "nothing more"
            raise self.took_another_way(f"it calls {node.name} in place of {expected}")
        seen = calls[number]
        if seen.segment in self._segments:
            output = node.run(args, kwargs)
        else:
            output = self._stage.hand_out(node, args, kwargs, hands_on=seen.hands_on)
            if number in self._arriving:
                output = self._with_arrivals(number, output)
        if number in self._leaving:
            self._keep(number, output)
        ends = node.is_block and seen.segment == self._segments.stop - 1 and not self._is_last
        if ends:
            self.is_done = True
            raise StageDone
        return output

    def _with_arrivals(self, number: int, output: Any) -> Any:
        """Return what a ghost hands out with the tensors that have crossed the border."""
        coming = self._arriving[number]
        place_in_output = iter(range(len(tensors_in(output))))

        def replaced(tensor: torch.Tensor) -> torch.Tensor:
            place = coming.get(next(place_in_output))
            if place is None:
                return tensor
            leaf = self._stage.borders[self._chunk_of_arrivals][place]
            arrived: torch.Tensor = self._stage.arrive(
                self._receive(place, tensor), leaf, self.passed, place
            )
            return arrived

        return map_tensors(replaced, output)

    @property
    def _chunk_of_arrivals(self) -> int:
        return self._stage.split.chunk_of_segment(self._segments.start)

    def _keep(self, number: int, output: Any) -> None:
        tensors = tensors_in(output)
        for place_in_output, place in self._leaving[number].items():
            self._left[place] = tensors[place_in_output]

    def end(self) -> None:
        """Take what crosses the next border.

        Raises:
            UserCodeError: it has no value.
        """
        passed = self.passed
        for place in range(sum(len(each) for each in self._leaving.values())):
            tensor = self._left[place]
            if isinstance(tensor, FakeTensor):
                raise self.took_another_way("a later stage needs what none has computed")
            has_graph = tensor.requires_grad and tensor.grad_fn is not None
            passed.edges.append(get_gradient_edge(tensor) if has_graph else None)
            passed.outputs.append(tensor.detach())
        self._left.clear()

    def took_another_way(self, what: str) -> UserCodeError:
        """Return the error of a forward that differs from the one that was followed."""
        return UserCodeError(
            "parallel.pp: the model's forward is not the one by which it was cut into stages: "
            f"{what}; each forward must call the same modules in the same order; write pp: 1"
        )


def _places(leaves: Iterable[Leaf]) -> dict[int, dict[int, int]]:
    """Return the places of leaves that cross a border, by call and number."""
    found: dict[int, dict[int, int]] = {}
    for place, leaf in enumerate(leaves):
        found.setdefault(leaf.call, {})[leaf.number] = place
    return found


def _signature(value: Any) -> Hashable:
    """Return what the shapes that come out of a call depend on.

    Raises:
        TypeError: it is not known of `value`.
    """
    if isinstance(value, torch.Tensor):
        return (value.shape, value.dtype)
    if isinstance(value, Mapping):
        return tuple((key, _signature(item)) for key, item in value.items())
    if isinstance(value, list | tuple):
        return tuple(_signature(item) for item in value)
    if isinstance(value, _PLAIN):
        return (type(value), value)
    raise TypeError
