"""Calls of a whole model whose stages are on several ranks, as a hook makes them to generate text.

Every stage makes the same call at once, and goes on where a micro-batch would leave it:

    stage 0   embed  blocks.0  ── sends ──►  ghosts ...            ◄── the result, from the last
    stage 1   ghosts           ◄── receives  blocks.1  norm  head  ──►

So caches, masks and lengths are those of the user's own forward: of a block that is elsewhere a
cache has keys and values of the right shapes, without values. A stage with several chunks runs all
of them in this one call, with ghosts in between, so that nothing is done to a cache twice. What the
last stage returns comes back from stage to stage, on the links of gradients, and each stage returns
just that.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import xxhash
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from zrun_core.data.batch import map_tensors
from zrun_core.distributed.rng import ForwardStreams
from zrun_core.errors import UserCodeError
from zrun_core.stages.flow import Leaf
from zrun_core.stages.links import StageLinks
from zrun_core.stages.node_calls import is_walking, walking
from zrun_core.stages.stage import ChunkPass, Stage, StageWalk
from zrun_core.user_code.forward_layers import Layer, wrapped_forward
from zrun_core.zero.passes.module_hooks import tensors_in

_RANGE = 2**62  # of digests, within an int64


class WholeCalls:
    """The calls of a stage's model that all stages make together."""

    def __init__(self, stage: Stage, links: StageLinks, draws: ForwardStreams) -> None:
        self._stage = stage
        self._links = links
        self._draws = draws
        self._chunk = stage.chunks[0]  # whose borders carry what is compared, and the result
        self._is_first = stage.index == 0
        self._is_last = stage.index == stage.split.pp - 1

    @contextmanager
    def installed(self, model: nn.Module) -> Iterator[None]:
        """Make calls of `model`, and of modules in it that have all blocks, those of all stages."""
        blocks = [model.get_submodule(name) for name in self._stage.flow.blocks]
        around = [each for each in model.modules() if set(blocks) <= set(each.modules())]
        around = [each for each in around if type(each).forward is not nn.Module.forward]
        with ExitStack() as layers:
            for module in around:
                call = _Entry(self, module).call_of_all_stages
                layers.enter_context(wrapped_forward(module, Layer.WHOLE_CALL, call))
            yield

    def call(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        """Call a module together with the other stages; return what the last one does.

        Raises:
            UserCodeError: another stage calls it with something else, or it calls its blocks
                otherwise than in training.
        """
        self._check_alike(args, kwargs)
        walk = _WholeWalk(self._stage, self._links, self._draws)
        with walking(walk):
            output = type(module)._call_impl(module, *args, **kwargs)
        if not walk.has_come_through:
            raise walk.took_another_way("it ended before the last block of this stage")
        output = self._from_last(output, walk)
        self._links.flush()
        return output

    def _check_alike(self, args: Any, kwargs: dict[str, Any]) -> None:
        """Check that the stage before calls with the same tensors."""
        own = _digest([each for each in tensors_in((args, kwargs)) if not _is_fake(each)])
        if not self._is_first:
            theirs = self._links.receive_activation(_number(own), self._chunk, 0, 0)
            if int(theirs) != own:
                raise UserCodeError(
                    "with parallel.pp the stages call a model together, and this one was given "
                    "other tensors than the stage before: give the same on every rank, as from a "
                    "seed that all have"
                )
        if not self._is_last:
            self._links.send_activation(self._on_device(_number(own)), self._chunk, 0, 0)

    def _from_last(self, output: Any, walk: StageWalk) -> Any:
        """Return an output with the tensors of the last stage in it."""
        tensors = _tensors_of(output)
        shapes = _number(_digest_of_text(str([(each.shape, each.dtype) for each in tensors])))
        if self._is_last:
            if any(map(_is_fake, tensors)):
                raise walk.took_another_way("its result needs what another stage has")
            # Slices of a vocabulary become whole where they are copied.
            tensors = [_copied(each) for each in tensors]
        else:
            theirs = self._links.receive_grad(shapes.shape, shapes.dtype, self._chunk, 0, 0)
            if int(theirs) != int(shapes):
                raise walk.took_another_way("it returns other tensors than on the last stage")
            tensors = [
                self._links.receive_grad(each.shape, each.dtype, self._chunk, 0, place)
                for place, each in enumerate(tensors)
            ]
        if not self._is_first:
            for place, each in enumerate([self._on_device(shapes), *tensors]):
                self._links.send_grad(each, self._chunk, 0, max(0, place - 1))
        found = iter(tensors)
        return map_tensors(lambda _: next(found), output, in_records=True)

    def _on_device(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self._links.device)


class _Entry:
    """Stands before a module that has all blocks: a layer."""

    def __init__(self, calls: WholeCalls, module: nn.Module) -> None:
        self._calls = calls
        self._module = module

    def call_of_all_stages(self, *args: Any, **kwargs: Any) -> Any:
        if is_walking():  # within the call of a module around it
            return type(self._module)._call_impl(self._module, *args, **kwargs)
        return self._calls.call(self._module, args, kwargs)


class _WholeWalk(StageWalk):
    """A call's way through the whole model, of which this stage runs its chunks."""

    def __init__(self, stage: Stage, links: StageLinks, draws: ForwardStreams) -> None:
        super().__init__(stage, stage.chunks[0], self._receive_next, draws, None)
        self._links = links
        self._chunk = stage.chunks[0]
        self._handing_on = {}  # a ghost may append to a cache

    @property
    def has_come_through(self) -> bool:
        """Return whether the call has come to the end of the last of this stage's chunks."""
        return self._chunk == self._stage.chunks[-1] and (self.is_done or self._is_last)

    def leave(self) -> None:
        """Send what crosses the border, and go on: what follows is elsewhere, or another chunk."""
        self.end()
        sent = self.passed.outputs
        for place, tensor in enumerate(sent):
            self._links.send_activation(tensor, self._chunk, 0, place)
        self.passed = ChunkPass()
        later = [chunk for chunk in self._stage.chunks if chunk > self._chunk]
        if later:
            self._begin_chunk(
                later[0], dict(zip(self._stage.borders[self._chunk + 1], sent, strict=True))
            )

    def _begin_chunk(self, chunk: int, known: Mapping[Leaf, torch.Tensor]) -> None:
        """Go on to a later chunk of this stage.

        `known` is what has crossed the border behind the chunk before it: of this, what crosses
        the later one's borders too comes once more, and is here.
        """
        self._chunk = chunk
        self.is_done = False
        self.go_to(chunk)
        for place, leaf in enumerate(self._stage.borders[chunk]):
            if leaf in known:
                self._receive_next(place, known[leaf])
        for place, leaf in enumerate(self._stage.borders[chunk + 1]):
            if leaf in known:
                self._left[place] = known[leaf]

    def _receive_next(self, place: int, like: torch.Tensor) -> torch.Tensor:
        return self._links.receive_activation(like, self._chunk, 0, place)


def _tensors_of(output: Any) -> list[torch.Tensor]:
    """Return the tensors that the model has returned, also in objects that have them."""
    found: list[torch.Tensor] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor)
        return tensor

    map_tensors(note, output, in_records=True)
    return found


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def _is_fake(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, FakeTensor)


def _number(value: int) -> torch.Tensor:
    return torch.tensor([value], dtype=torch.int64)


def _digest(tensors: list[torch.Tensor]) -> int:
    """Return a number that differs where tensors do."""
    parts = []
    for tensor in tensors:
        values = tensor.detach().cpu().contiguous().reshape(-1)
        of_values = xxhash.xxh3_64_intdigest(values.view(torch.uint8).numpy().data)
        parts.append((tuple(tensor.shape), str(tensor.dtype), of_values))
    return _digest_of_text(str(parts))


def _digest_of_text(text: str) -> int:
    return xxhash.xxh3_64_intdigest(text.encode()) % _RANGE
