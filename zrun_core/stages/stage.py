"""A stage of a pipeline: the user's own forward, of which this rank computes its chunks.

Every stage runs the whole forward, on its own batch. What depends on the batch alone (masks,
positions, labels) each of them computes; so the hidden states are all that is sent.

    call of a node          of this chunk   runs
                            before it       is a ghost: hands out tensors without values, in whose
                                            place those come that crossed the border
    last block of the chunk                 ends the forward, by an exception: `StageDone`

Tensors without values are fake tensors: no memory, no time, and whatever is made of one has no
value either. So a mistake about what crosses a border cannot become a wrong number.

[Note: what a forward draws]
Noise that is drawn before a border may be compared with a prediction behind it, so each stage draws
the same outside of nodes: from a stream of the micro-batch, which nodes do not move, as they draw
from streams of their own. Where values are dropped of a tensor that has none, as many numbers are
drawn as the stage that has them draws: see `Valueless`.

[Note: parameters of other stages]
They are removed from their modules, as if there were none: nothing of them is gathered, saved or
counted. In their place is an attribute of the same name, a fake tensor, which is a parameter to
whoever asks for its kind. A forward that asks a module for all of its parameters finds it too:
what is made of it has no values, which no loss may have, and its shape is right.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from zrun_core.data.batch import map_tensors
from zrun_core.distributed.rng import ForwardStreams
from zrun_core.errors import UserCodeError
from zrun_core.pipeline.split import Split
from zrun_core.stages.flow import Leaf, ModelFlow
from zrun_core.stages.ghosts import Ghosts
from zrun_core.stages.node_calls import Node, Watcher, install_nodes, is_walking, walking
from zrun_core.stages.valueless import Valueless
from zrun_core.zero.passes.module_hooks import tensors_in
from zrun_core.zero.passes.running_pass import RunningPass
from zrun_core.zero.wrap.auto_wrap import repeated_blocks, running_norm_params
from zrun_core.zero.wrap.foreign import lacks_params, remove_param
from zrun_core.zero.wrap.lookups import WithOthers, WithStandIns

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
        nodes: modules of all nodes of the model.
        borders: by chunk, what crosses the border before it; and nothing after the last one.
        places: of the same, by call and place in what it returns, the place among what crosses.
        ghosts: in place of what other stages have.
        handing_on: by chunk, the calls of ghosts, by number, whose result is like what they are
            given, and may be just that; not those that hand out what crosses a border.
        saved_elsewhere: buffers that every stage has, and another one saves.
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
            owners: by the first name of a parameter, the stages that have it.

        Raises:
            JobError: something cannot cross a border.
        """
        self.flow = flow
        self.split = split
        self.index = index
        self.chunks = split.chunks(index)
        self.ghosts = Ghosts(device)
        self._begin = torch.empty((), device=device, requires_grad=True)
        self.borders = [
            flow.crossing(split.blocks(chunk).start) for chunk in range(split.num_chunks)
        ]
        self.borders.append(())
        self.places = [_places(border) for border in self.borders]
        self.handing_on = {chunk: self._find_handing_on(chunk) for chunk in self.chunks}
        blocks = repeated_blocks(model)
        nodes = install_nodes(model, blocks)
        for node in nodes:
            self.ghosts.keep_forwards(node.module)
        self.nodes = [node.module for node in nodes]
        self.own_blocks = [
            model.get_submodule(flow.blocks[number])
            for chunk in self.chunks
            for number in split.blocks(chunk)
        ]
        self._remove_foreign_params(model, owners, dtype)
        self._remove_foreign_buffers(model, dict(blocks))
        for node in nodes:
            node.is_elsewhere = lacks_params(node.module)

    @property
    def run_elsewhere(self) -> set[str]:
        """Return the names of nodes that other stages run, and this one does not."""
        here: set[str] = set()
        others: set[str] = set()
        for call in self.flow.calls:
            stage = self.split.stage_of(self.split.chunk_of_segment(call.segment))
            (here if stage == self.index else others).add(call.name)
        return others - here

    def _find_handing_on(self, chunk: int) -> dict[int, str]:
        crossing = {leaf.call for leaf in (*self.borders[chunk], *self.borders[chunk + 1])}
        segments = self.split.segments(chunk)
        return {
            number: call.name
            for number, call in enumerate(self.flow.calls)
            if call.hands_on and call.segment not in segments and number not in crossing
        }

    def _remove_foreign_params(
        self, model: nn.Module, owners: Mapping[str, Sequence[int]], dtype: torch.dtype
    ) -> None:
        """Remove parameters of other stages. See [Note: parameters of other stages]."""
        self._orders: dict[nn.Module, tuple[str, ...]] = {}  # of modules that lack parameters
        in_fp32 = running_norm_params(model)
        names = {id(param): name for name, param in model.named_parameters()}
        for module in model.modules():
            for key, param in list(module._parameters.items()):
                if param is None:
                    continue
                own_dtype = torch.float32 if id(param) in in_fp32 else dtype
                fake = self.ghosts.fake_like(param, own_dtype)
                name = names[id(param)]
                if self.index in owners[name]:
                    continue
                self.ghosts.mode.refuse_writes(fake, name)
                self._orders.setdefault(module, tuple(module._parameters))
                remove_param(module, key, fake)

    def show_others(self, running: RunningPass) -> None:
        """Have forwards find all parameters and buffers of a module, also those of other stages.

        Args:
            running: the pass that runs, of the model, which is sharded.
        """

        def is_shown() -> bool:
            return is_walking() or running.active

        def with_others(module: nn.Module, own: dict[str, Any], order: Sequence[str]) -> WithOthers:
            others = {key: vars(module)[key] for key in order if key not in own}
            return WithOthers(own, others, order, is_shown)

        for module, order in self._orders.items():
            module._parameters = with_others(module, module._parameters, order)
        for module, order in self._buffer_orders.items():
            module._buffers = with_others(module, module._buffers, order)

        ends_forwards = self.split.num_chunks - 1 in self.chunks

        def hides() -> bool:
            # What metrics make on other stages than the last one counts for nothing.
            return is_walking() and (self._model.training or ends_forwards)

        for module, fakes in self._changed_elsewhere.items():
            module._buffers = WithStandIns(module._buffers, fakes, hides)

    def _remove_foreign_buffers(self, model: nn.Module, blocks: Mapping[str, nn.Module]) -> None:
        """Remove the buffers of other stages' blocks; others are saved by one stage only.

        What a forward reads outside of nodes every stage keeps; of what nodes of others change it
        has old values, which a forward does not find.
        """
        self._model = model
        self.saved_elsewhere: set[str] = set()
        self._buffer_orders: dict[nn.Module, tuple[str, ...]] = {}  # of modules that lack some
        self._changed_elsewhere: dict[nn.Module, dict[str, torch.Tensor]] = {}  # fakes of these
        here: dict[str, bool] = {}  # by node
        for call in self.flow.calls:
            stage = self.split.stage_of(self.split.chunk_of_segment(call.segment))
            here.setdefault(call.name, stage == self.index)
        for name, module in model.named_modules():
            node = next((n for n in here if name == n or name.startswith(f"{n}.")), None)
            is_saved_here = self.index == 0 if node is None else here[node]
            if is_saved_here:
                continue
            # Without parameters, a node runs on each stage.
            is_ghost = node is not None and lacks_params(model.get_submodule(node))
            order = tuple(module._buffers)
            for key, buffer in list(module._buffers.items()):
                if buffer is None:
                    continue
                full_name = f"{name}.{key}" if name else key
                if node is None:
                    self.saved_elsewhere.add(full_name)
                    continue
                fake = self.ghosts.mode.from_tensor(buffer)
                if node in blocks:
                    self._buffer_orders[module] = order
                    del module._buffers[key]
                    vars(module)[key] = fake
                    continue
                module._non_persistent_buffers_set.add(key)
                if is_ghost and full_name in self.flow.changed:
                    self._changed_elsewhere.setdefault(module, {})[key] = fake

    def forward(
        self,
        chunk: int,
        call: Callable[[], Any],
        receive: Receive,
        draws: ForwardStreams,
        *,
        may_skip: bool = False,
        watcher: Watcher | None = None,
    ) -> ChunkPass:
        """Run a micro-batch's forward through a chunk.

        Args:
            receive: brings what crosses the border before the chunk.
            may_skip: `call` need not call the model. Then nothing crosses any border.

        Raises:
            UserCodeError: the forward calls other modules than the one that was followed.
        """
        walk = StageWalk(self, chunk, receive, draws, watcher)
        with walking(walk):
            try:
                walk.passed.result = call()
            except StageDone:
                walk.end()
        if chunk == self.split.num_chunks - 1:
            if any(isinstance(tensor, FakeTensor) for tensor in tensors_in(walk.passed.result)):
                raise walk.took_another_way(
                    "its result needs what another stage has, as a parameter or a buffer that "
                    "the first forward does not read outside of its module"
                )
            return walk.passed
        walk.passed.result = None
        is_skipped = may_skip and not walk.num_calls
        if not walk.is_done and not is_skipped:
            raise walk.took_another_way(f"it ended before {self._last_block(chunk)}")
        return walk.passed

    def _last_block(self, chunk: int) -> str:
        return self.flow.blocks[self.split.blocks(chunk).stop - 1]

    def arrive(
        self, tensor: torch.Tensor, leaf: Leaf, passed: ChunkPass, place: int
    ) -> torch.Tensor:
        """Return a tensor that has come, with a place in the graph if it gets a gradient."""
        if not (leaf.requires_grad and torch.is_grad_enabled()):
            return tensor
        arrived = Arrived(tensor.shape, tensor.dtype, tensor.device)
        passed.arrived[place] = arrived
        return _Arrival.apply(self._begin, tensor, arrived)  # type: ignore[no-any-return, no-untyped-call]


class StageWalk:
    """A micro-batch's way through one chunk.

    Attributes:
        passed: what is kept of it.
        is_done: the chunk's last block has run.
        num_calls: of nodes so far.
    """

    def __init__(
        self,
        stage: Stage,
        chunk: int,
        receive: Receive,
        draws: ForwardStreams,
        watcher: Watcher | None,
    ) -> None:
        self.passed = ChunkPass()
        self._draws = draws
        self._watcher = watcher
        self.is_done = False
        self._stage = stage
        self._receive = receive
        self._left: dict[int, torch.Tensor] = {}  # what crosses the next border, by place
        self.go_to(chunk)
        # Calls that need not run; where modules keep something of each call, all of them do.
        self._handing_on: Mapping[int, str] = stage.handing_on[chunk]
        self._hands_on = stage.ghosts.hands_on
        self.num_calls = 0

    def go_to(self, chunk: int) -> None:
        """Make a chunk the one whose nodes run."""
        stage = self._stage
        self._segments = stage.split.segments(chunk)
        self._is_last = chunk == stage.split.num_chunks - 1
        self._border = stage.borders[chunk]
        self._arriving, self._leaving = stage.places[chunk], stage.places[chunk + 1]

    def call(self, node: Node, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run a node of this chunk, or let its ghost hand out what has come."""
        number = self.num_calls
        self.num_calls += 1
        is_like = self._handing_on.get(number) == node.name
        if is_like and args and type(args[0]) is Valueless and self._hands_on(node, args, kwargs):
            return args[0]  # most of the calls come here
        calls = self._stage.flow.calls
        if number >= len(calls) or calls[number].name != node.name:
            expected = calls[number].name if number < len(calls) else "nothing more"
            raise self.took_another_way(f"it calls {node.name} in place of {expected}")
        seen = calls[number]
        if seen.segment in self._segments:
            with self._draws.of_call(number):
                output = node.run(args, kwargs)
            if self._watcher is not None:
                self._watcher(number, node, output)
        else:
            output = self._stage.ghosts.hand_out(node, args, kwargs)
            if number in self._arriving:
                output = self._with_arrivals(number, output)
        if number in self._leaving:
            self._keep(number, output)
        ends = node.is_block and seen.segment == self._segments.stop - 1 and not self._is_last
        if ends:
            self.is_done = True
            self.leave()
        return output

    def leave(self) -> None:
        """Go on after the chunk's last block: a micro-batch's way ends there."""
        raise StageDone

    def _with_arrivals(self, number: int, output: Any) -> Any:
        """Return what a ghost hands out with the tensors that have crossed the border."""
        coming = self._arriving[number]
        numbers = itertools.count()

        def replaced(tensor: torch.Tensor) -> torch.Tensor:
            place = coming.get(next(numbers))
            if place is None:
                return tensor
            received = self._receive(place, tensor)
            return self._stage.arrive(received, self._border[place], self.passed, place)

        return map_tensors(replaced, output)

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
            f"{what}; each forward must call the same modules in the same order, and eval.metrics "
            "the model once at most; write pp: 1"
        )


def _places(leaves: Iterable[Leaf]) -> dict[int, dict[int, int]]:
    """Return the places of leaves that cross a border, by call and number."""
    found: dict[int, dict[int, int]] = {}
    for place, leaf in enumerate(leaves):
        found.setdefault(leaf.call, {})[leaf.number] = place
    return found
