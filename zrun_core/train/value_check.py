"""Compare, before the first step, what a divided model computes with what the whole one does.

    rank 0, before the model is divided     all ranks, once they have their parts
    forward of the first micro-batch        the same forward, by the runtime's own passes
    of each node: its norm, some sums       the same, of the nodes of each rank

A plan of slices that is wrong keeps all shapes as often as not, and a number that is lost between
two stages has no shape at all. Their values tell. Both forwards begin with the same values, batch
and random numbers, and leave no trace.

Slices add up in another order, which in halves would hide as much as a mistake makes. So where
layers are divided both compute in fp32, with the values that halves have: see `InFp32`. Stages
compute with whole layers, whose bits are the same in any format.

A few samples of the micro-batch tell as much as all of them: see `first_samples`. Where the
forward takes no other number than that of the job, all of them are used.

[Note: what is compared of a node]
Of the first tensor that it returns, the 2-norm, and the sums of `tensor_sums.py`, which see
features in another order too. Of the whole tensor the same is noted of each rank's slice of the
sequence, where that could be one; of other slices the norms of the group are added up.

[Note: which numbers are drawn]
Where the first ones make all tokens alike, as a mask drawn as 0 does, nothing that mixes them is
seen. The forwards are then made with the next ones.

[Note: a second forward]
Where the first one leaves something behind, as a counter or a generator's position, a second one
begins with that and is compared too: what a part of the model changes behind a border, another
part in front of it may never see.

Gradients are compared behind the forwards: see `gradient_check.py`.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from zrun_core.activations.checkpoint import apply_checkpointing
from zrun_core.checkpoint.model_state import persistent_buffers
from zrun_core.checkpoint.whole_values import WholeValues, within
from zrun_core.data.batch import MicroBatch, copied, digest
from zrun_core.distributed.mesh import Mesh
from zrun_core.distributed.rng import Streams
from zrun_core.errors import CheckpointError, JobError, UserCodeError, ZrunError
from zrun_core.hardware import accelerator
from zrun_core.sizes import format_size
from zrun_core.spine.sections.activations import ActivationsConfig
from zrun_core.spine.tracebacks import first_line
from zrun_core.stages.node_calls import DrawingWalk, Node, Walk, installed_nodes, walking
from zrun_core.tensor_parallel.divide import Divided
from zrun_core.tensor_parallel.regions import Regions
from zrun_core.train.evaluator import evaluation_mode
from zrun_core.train.gradient_check import (
    NudgingWalk,
    PartialGradients,
    SavedTensors,
    WholeGradients,
    compare_gradients,
    noting_gradients,
    why_not_told,
)
from zrun_core.train.in_fp32 import InFp32
from zrun_core.train.micro_batches import MicroBatchRunner, share_of
from zrun_core.train.tensor_sums import NUM_SUMS, distance, sums_of
from zrun_core.user_code.build import Built
from zrun_core.user_code.loss import LossFunction, compute_loss
from zrun_core.user_code.trial import kept_attributes, watched_state
from zrun_core.user_code.user import user_code
from zrun_core.zero.passes.module_hooks import tensors_in
from zrun_core.zero.sharded_model import ShardedModel
from zrun_core.zero.unit.precision import LossScaler, Precision
from zrun_core.zero.wrap.auto_wrap import repeated_blocks, running_norm_params
from zrun_core.zero.wrap.fakes import kept_buffers

TRUST = "guards.trust"
_LOSS = "loss"  # its name in `TRUST`
_MOST_BYTES = 0.5  # of the memory that is free: more of it than this, and nothing is compared
_ROUNDING = 1e-4  # relative difference that another order of sums may make, in fp32
_SEQUENCE_ADVICE = (
    "an operation outside of attention counts, orders or mixes tokens, of which each rank has a "
    "slice, or features: write parallel.sequence: false"
)
_ALIKE = 1e-5  # how far numbers are apart, beside the largest, that differ by rounding alone
_PATIENCE = 1 / 4  # of what ranks wait for each other, as long as one reads values of files
_ITS_GRADIENTS = "its gradients are "
_NOT_COMPARED = "not compared before training with what the whole model computes: "
_DRAWS = 6  # of random numbers that are tried


class Seen(NamedTuple):
    """What a node has returned: see [Note: what is compared of a node].

    Attributes:
        name: of the node.
        shape: of the tensor.
        norm: 2-norm.
        sums: see the note.
        slices: sums of each rank's slice of the sequence; empty: there are none.
        is_alike: all of its tokens are the same.
    """

    name: str
    shape: Sequence[int]
    norm: float
    sums: Sequence[float]
    slices: Sequence[Sequence[float]]
    is_alike: bool

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


class Watch:
    """Notes what the nodes of a forward return, by the number of the call."""

    def __init__(self, num_slices: int = 1) -> None:
        """
        Args:
            num_slices: of the sequence, of each of which the sums are noted too.
        """
        self._num_slices = num_slices
        self._seen: dict[int, tuple[str, torch.Size, torch.Tensor]] = {}

    def __call__(self, number: int, node: Node, output: Any) -> None:
        """Note what a call returns."""
        first = next((t for t in tensors_in(output) if t.is_floating_point()), None)
        if first is None or not first.numel():
            return
        values = first.detach().double()
        tokens = values.flatten(0, -2) if values.dim() > 1 else values.view(-1, 1)
        distance = (tokens - tokens[0]).abs().max()
        parts = [values]
        if values.dim() > 1 and self._num_slices > 1 and not values.shape[1] % self._num_slices:
            parts += values.chunk(self._num_slices, dim=1)
        own = torch.stack([values.norm(), distance, values.abs().max()])
        numbers = torch.cat([own, *(sums_of(part.flatten()) for part in parts)])
        self._seen[number] = node.name, first.shape, numbers

    def read(self) -> dict[int, Seen]:
        """Return all of it."""
        found = {}
        for number, (name, shape, numbers) in self._seen.items():
            norm, distance, largest, *rest = numbers.tolist()
            sums, *slices = (rest[at : at + NUM_SUMS] for at in range(0, len(rest), NUM_SUMS))
            is_alike = distance <= _ALIKE * largest and math.prod(shape[:-1]) > 1
            found[number] = Seen(name, list(shape), norm, sums, slices, is_alike)
        return found


@dataclass(frozen=True)
class WholeForward:
    """What the forward of the whole model has come to, on rank 0; elsewhere it is empty.

    Attributes:
        loss: of the micro-batch; None: it was not computed.
        nodes: by the number of the call.
        why_not: why it was not computed, in words for the user; "" if it was.
        draw: which random numbers it has drawn.
        gradients: of the same micro-batch; None: they are not compared.
        why_no_gradients: in words for the user.
        second: what the next forward has come to; None: this one leaves nothing behind.
    """

    loss: float | None = None
    nodes: Mapping[int, Seen] = field(default_factory=dict)
    why_not: str = ""
    draw: int = 0
    gradients: WholeGradients | None = None
    why_no_gradients: str = ""
    second: WholeForward | None = None

    @property
    def is_telling(self) -> bool:
        """Return whether each node but the last returns tokens that differ."""
        return not any(seen.is_alike for _, seen in sorted(self.nodes.items())[:-1])


class ValueCheck:
    """The two forwards, and their comparison.

    Attributes:
        whole: the first of them.
    """

    def __init__(
        self,
        batches: Sequence[MicroBatch],
        loss: LossFunction | None,
        precision: Precision,
        streams: Streams,
        mesh: Mesh,
        global_size: int,
        *,
        is_compiled: bool = False,
        patience_s: float = math.inf,
        trust: Sequence[str] = (),
    ) -> None:
        """
        Args:
            batches: the first one counts whose forward the whole model computes: few samples of
                this rank's first micro-batch, on its device, and all of it.
            loss: the user's loss function; None: the model returns its loss.
            trust: patterns of modules that may differ.
            patience_s: how long ranks wait for each other.
        """
        self._batches = batches
        self._which = 0  # of them
        self._global_size = global_size
        self._loss = loss
        self._precision = precision
        self._streams = streams
        self._mesh = mesh
        self._has_slices = mesh.tensor.size > 1
        self._is_compiled = is_compiled
        self._trust = trust
        self._reading_s = _PATIENCE * patience_s
        self._widens = self._has_slices and precision.compute != torch.float32
        self._path: Path | None = None  # of the values of the whole model
        self.whole = WholeForward()

    def run_whole(
        self,
        built: Built,
        device: torch.device,
        free_bytes: int,
        open_values: Callable[[], WholeValues] | None,
    ) -> None:
        """Run the forward of the whole model; of all ranks, on rank 0.

        Args:
            open_values: returns the values that the run begins or goes on with; None: those that
                the model was built with.
        """
        if self._mesh.world.index:
            return
        numel = sum(param.numel() for param in built.module.parameters())
        num_bytes = numel * self._precision.compute.itemsize
        if num_bytes > _MOST_BYTES * free_bytes:
            self.whole = WholeForward(why_not=f"the whole model takes {format_size(num_bytes)}")
            return
        try:
            why_no_gradients = why_not_told(built.module)  # its own parameters have the hooks
            values = None
            if open_values is not None:
                began = time.monotonic()
                values = within(open_values(), self._reading_s, began)
                self._path = values.path
            limit = _MOST_BYTES * free_bytes - num_bytes
            with _with_values(built, self._precision.compute, device, values):
                whole = self._run_any(built.module, device, limit, why_no_gradients)
        except CheckpointError as error:
            self.whole = WholeForward(why_not=_reason(error))
            return
        except Exception as error:  # of one rank alone: the others would wait for it
            reason = f"on one rank its forward fails: {_reason(error)}"
            self.whole = WholeForward(why_not=reason)
            return
        self.whole = whole
        if accelerator.is_accelerator(device):
            accelerator.empty_cache()  # the shards need it

    @property
    def _batch(self) -> MicroBatch:
        return self._batches[self._which]

    def _run_any(
        self, model: nn.Module, device: torch.device, limit: float, why_no_gradients: str
    ) -> WholeForward:
        """Return what the whole model comes to, of the first batch that its forward takes."""
        last = len(self._batches) - 1
        while self._which < last:
            with suppress(Exception):
                return self._run_whole(model, device, limit, why_no_gradients)
            self._which += 1
        return self._run_whole(model, device, limit, why_no_gradients)

    def _run_whole(
        self, model: nn.Module, device: torch.device, limit: float, why_no_gradients: str
    ) -> WholeForward:
        """Return what the whole model comes to; activations may take `limit` bytes."""
        for draw in range(_DRAWS):
            whole = self._forward(model, device, draw)
            if whole.is_telling:
                break
        found, loss = replace(whole, why_no_gradients=why_no_gradients), math.nan
        if not why_no_gradients:
            found, loss = self._with_gradients(whole, model, device, limit)
        # The forward of the backward is another one with the same numbers, but for its format.
        is_same_forward = not (self._widens or whole.draw or whole.second is not None)
        is_steady = is_same_forward and _is_steady(whole.loss, loss)
        if is_steady or _agree(whole, self._forward(model, device, whole.draw)):
            return found
        why_not = "its loss differs from one forward to the next with the same random numbers"
        return WholeForward(why_not=why_not)

    def _forward(self, model: nn.Module, device: torch.device, draw: int) -> WholeForward:
        """Return what a forward comes to, and the next one if it leaves something behind."""
        with ExitStack() as stack:
            for context in self._contexts(model):
                stack.enter_context(context)
            names_of_changed = watched_state(model, self._loss)
            first = self._next_forward(model, device, draw)
            if not names_of_changed():
                return first
            return replace(first, second=self._next_forward(model, device, draw))

    def _next_forward(self, model: nn.Module, device: torch.device, draw: int) -> WholeForward:
        watch = Watch(self._mesh.tensor.size)
        draws = self._streams.forwards
        with ExitStack() as stack:
            stack.enter_context(self._precision.autocast(device))
            stack.enter_context(installed_nodes(model, repeated_blocks(model)))
            stack.enter_context(draws.of_micro(0, draw))
            stack.enter_context(walking(DrawingWalk(draws, watch)))
            loss = self._loss_of(model)
        return WholeForward(float(loss), watch.read(), draw=draw)

    def _with_gradients(
        self, whole: WholeForward, model: nn.Module, device: torch.device, limit: float
    ) -> tuple[WholeForward, float]:
        """Return what a forward has come to, with the gradients, or why they are not compared.

        `whole` is what it has come to; activations may take `limit` bytes. With it comes the loss
        of the forward that the gradients are of; not a number: there is none.
        """
        saved = SavedTensors(model, limit)
        draws = self._streams.forwards

        def backward(walk: type[DrawingWalk]) -> tuple[dict[str, torch.Tensor], float]:
            try:
                with _recomputing(model):
                    return self._backward(model, device, saved, walk(draws))
            except (UserCodeError, JobError):  # of blocks that cannot be, as with a cache
                return self._backward(model, device, saved, walk(draws))

        try:
            rows, loss = backward(DrawingWalk)
            nudged, _ = backward(NudgingWalk)
        except Exception as error:  # as of the forward
            reason = f"on one rank its backward fails: {_reason(error)}"
            if saved.too_many:
                reason = f"activations of the whole model take more than {format_size(limit)}"
            return replace(whole, why_no_gradients=reason), math.nan
        names = [name for name, _ in model.named_parameters() if name in rows and name in nudged]
        numels = dict(model.named_parameters())
        gradients = WholeGradients(
            names,
            [numels[name].numel() for name in names],
            torch.stack([rows[name] for name in names]),
            torch.stack([nudged[name] for name in names]),
        )
        return replace(whole, gradients=gradients), loss

    def _backward(
        self, model: nn.Module, device: torch.device, saved: SavedTensors, walk: Walk
    ) -> tuple[dict[str, torch.Tensor], float]:
        """Run a forward and its backward; return the rows of the gradients by name, and the loss.

        `saved` counts what the forward keeps, and `walk` goes through its nodes.
        """
        scaler = LossScaler(self._precision, device)
        with ExitStack() as stack:
            rows = stack.enter_context(noting_gradients(model))
            for context in self._contexts(model):
                stack.enter_context(context)
            with ExitStack() as forward:
                forward.enter_context(self._precision.autocast(device))
                forward.enter_context(installed_nodes(model, repeated_blocks(model)))
                forward.enter_context(self._streams.forwards.of_micro(0, 0))
                forward.enter_context(walking(walk))
                forward.enter_context(saved)
                batch = replace(self._batch, batch=copied(self._batch.batch))
                with user_code("forward failed"):
                    loss = compute_loss(model, batch.batch, self._loss, batch.num_samples)
                share = share_of(loss, batch, self._global_size)
            with user_code("backward failed"):
                scaler.scaled(share).backward()
        return rows, float(loss.value.detach())

    def _contexts(self, model: nn.Module) -> list[AbstractContextManager[Any]]:
        """Return what a forward runs in, from the outside in."""
        contexts: list[AbstractContextManager[Any]] = [
            kept_attributes(model, self._loss, self._batch.batch),
            kept_buffers(model),
        ]
        if self._has_slices:
            # Regions draw on each rank for itself, and a model in evaluation seldom draws at all.
            contexts.append(evaluation_mode(model))
        if self._is_compiled:  # for the run's own passes: not for these few
            contexts.append(torch.compiler.set_stance("force_eager"))
        return contexts

    def _loss_of(self, model: nn.Module) -> torch.Tensor:
        batch = copied(self._batch.batch)
        in_fp32 = InFp32() if self._widens else nullcontext()
        with torch.no_grad(), user_code("forward failed"), in_fp32:
            loss = compute_loss(model, batch, self._loss, self._batch.num_samples)
        return loss.value.detach()

    def compare(
        self,
        runner: MicroBatchRunner,
        sharded: ShardedModel,
        divided: Divided | None,
        goes_on_from: Path | None,
    ) -> list[str]:
        """Run the forward with what each rank has, and compare. Collective over all ranks.

        Args:
            sharded: what this rank has of the model.
            goes_on_from: the step of which it has the values; None: the run begins.
            divided: layers of which it has slices; None: it has all of each.

        Returns:
            Notes for the user: why nothing was compared.

        Raises:
            JobError: the model computes something else than the whole one.
        """
        comm, model = sharded.comm, sharded.module
        whole = self._whole_at(goes_on_from)
        gradients = whole.gradients
        of_gradients = None if gradients is None else [gradients.names, gradients.numels]
        why_no_gradients = whole.why_no_gradients
        forwards = [(each.loss, each.nodes) for each in (whole, whole.second) if each is not None]
        own = [self._which, forwards, whole.why_not, whole.draw, of_gradients, why_no_gradients]
        told = comm.all_gather_bytes(json.dumps(own).encode(), self._mesh.world, name="whole model")
        which, forwards, why_not, draw, of_gradients, why_no_gradients = json.loads(told[0])
        self._which = which
        if why_not:
            return [not_compared(why_not)]
        if divided is not None:
            self._check_all_ran(divided, model, forwards)
        seen = []
        with ExitStack() as stack:
            if self._widens:  # what gathers parameters within a forward keeps their format
                stack.enter_context(sharded.gathered())
            for context in self._contexts(model):
                stack.enter_context(context)
            regions = None if divided is None else divided.regions
            has_drawn = stack.enter_context(_drawing_in(regions))
            for _ in forwards:
                watch = Watch()
                loss = runner.trial(lambda: self._loss_of(model), watch, draw)
                seen.append((None if loss is None else float(loss), watch.read()))
        mine = [seen, self._mesh.data.index, has_drawn(), digest(self._batch.batch)]
        everyone = [
            json.loads(each)
            for each in comm.all_gather_bytes(
                json.dumps(mine).encode(), self._mesh.world, name="divided model"
            )
        ]
        if any(drawn for *_, drawn, _ in everyone):
            return [not_compared("ranks draw their own random numbers inside of its layers")]
        same = [each for each in everyone if each[1] == 0]  # they compute the batch of rank 0
        if len({read for *_, read in same}) > 1:
            return [not_compared("ranks have read different batches")]  # the first step names them
        trusted = self._judge_all(forwards, [of_rank for of_rank, *_ in same])
        if trusted:
            return [trusted]
        if of_gradients is not None and not runner.makes_trial_steps:
            why_no_gradients = "this schedule makes no step on trial"
        if of_gradients is None or why_no_gradients:
            return [not_compared(why_no_gradients, _ITS_GRADIENTS)]
        return self._compare_gradients(runner, sharded, *of_gradients)

    def _check_all_ran(self, divided: Divided, model: nn.Module, forwards: Sequence[Any]) -> None:
        """Check that the whole model's forwards ran each block of which ranks have slices.

        Raises:
            JobError: they left one out, and nobody has seen what its slices compute.
        """
        ran = {Seen(*values).name for _, nodes in forwards for values in nodes.values()}
        for name, _ in repeated_blocks(model):
            if name in ran or not divided.divides(name) or self._is_trusted(name):
                continue
            raise JobError(
                f"{self._axes}: the forward of the first micro-batch leaves out {name}, so that "
                "what ranks compute with its slices cannot be compared with the whole model: have "
                f"it run in evaluation mode, or write `whole` for its linears in parallel.plan; or "
                f"tp: 1; {_insist(name)}"
            )

    def _judge_all(self, forwards: Sequence[Any], told: Sequence[Any]) -> str:
        """Compare each of the forwards; return the note of a difference that is trusted.

        `forwards` are those of the whole model, and `told` has what each rank's have come to.

        Raises:
            JobError: there is another difference.
        """
        for number, (whole_loss, whole_nodes) in enumerate(forwards):
            found = _Found.of([of_rank[number] for of_rank in told])
            nodes = {int(call): Seen(*values) for call, values in whole_nodes.items()}
            try:
                self._judge(nodes, whole_loss, found)
            except _DiffersError as error:
                if self._is_trusted(error.name):
                    return self._trusted(error.name, error.how)
                if number == 0:
                    raise JobError(str(error)) from None
                raise JobError(self._of_second(error)) from None
        return ""

    def _whole_at(self, goes_on_from: Path | None) -> WholeForward:
        """Return what the whole model has come to, if it has the values of that step."""
        is_other = goes_on_from is not None and self._path != goes_on_from
        if is_other and not self.whole.why_not:
            return WholeForward(why_not=f"the newest step is not the one read, {goes_on_from}")
        return self.whole

    def _compare_gradients(
        self,
        runner: MicroBatchRunner,
        sharded: ShardedModel,
        names: Sequence[str],
        numels: Sequence[int],
    ) -> list[str]:
        """Make a step that updates nothing, and compare its gradients. Collective over all ranks.

        `names` and `numels` are of the parameters that have a gradient in the whole model.

        Returns:
            Notes for the user.

        Raises:
            JobError: one is another.
        """
        comm = sharded.comm
        partial = PartialGradients(sharded.units, names, comm.device)
        batch = replace(self._batch, batch=copied(self._batch.batch))
        with ExitStack() as stack:
            for context in self._contexts(sharded.module):
                stack.enter_context(context)
            runner.trial_step(batch, partial.see)
        compute = self._precision.compute
        found = compare_gradients(
            self.whole.gradients, names, numels, partial, compute, comm, self._mesh.world
        )
        if found is None:
            return [not_compared("some are not finite", _ITS_GRADIENTS)]
        if not found:
            return []
        nearest = found[-1]  # to the loss: where backward has begun to differ
        others = f" (and those of {len(found) - 1} more)" if len(found) > 1 else ""
        owner = nearest.name.rpartition(".")[0] or nearest.name
        how = f"{nearest.share:.2g} of its norm differs"
        if nearest.times is not None:
            how = f"it is {nearest.times:.3g} times that"
        parts = nearest.name.split(".")
        if any(self._is_trusted(".".join(parts[:end])) for end in range(1, len(parts) + 1)):
            return [self._trusted(f"the gradient of {nearest.name}", how)]
        raise JobError(
            f"{self._axes}: the gradient of {nearest.name}{others} is another than in the whole "
            f"model, though the forward is the same: for the first micro-batch, {how}; "
            f"{self._gradient_advice}; {_insist(owner)}"
        )

    def _judge(self, whole: Mapping[int, Seen], whole_loss: float, found: _Found) -> None:
        """Raise the first difference, in the order of the calls."""
        axes = self._axes
        for number, expected in sorted(whole.items()):
            seen = found.nodes.get(number, ())
            apart = _apart(expected, seen)
            if apart > _ROUNDING:
                advice = self._advice
                if _has_slices_of_sequence(expected, seen):
                    advice = _SEQUENCE_ADVICE
                how = f"{apart:.2g} of its norm differs"
                raise _DiffersError(
                    expected.name,
                    f"of what it returns for the first micro-batch, {how}",
                    f"{axes}: {expected.name} computes something else than in the whole model: of "
                    f"what it returns for the first micro-batch, {how}; {advice}; "
                    + _insist(expected.name),
                )
        if found.loss is None or not math.isfinite(whole_loss):
            return
        apart = abs(found.loss - whole_loss) / max(abs(whole_loss), 1e-6)
        if apart > _ROUNDING:
            how = f"{found.loss:.6g}, and that of the whole model {whole_loss:.6g}"
            raise _DiffersError(
                _LOSS,
                f"for the first micro-batch it is {how}",
                f"{axes}: the loss of the first micro-batch is {how}, though its blocks return the "
                "same: what your forward or loss computes outside of them looks at what a rank has "
                f"a part of; make it of what modules return, or write {self._one()}; "
                + _insist(_LOSS),
            )

    def _is_trusted(self, name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in self._trust)

    def _trusted(self, name: str, how: str) -> str:
        """Return the note of a difference that the user insists on."""
        return (
            f"{TRUST}: with {self._axes} {name} is another than in the whole model ({how}), and "
            "trains all the same; what follows it, and gradients, are not compared"
        )

    def _of_second(self, difference: _DiffersError) -> str:
        """Return what to say of a difference that the first forward does not have."""
        name = difference.name
        what = f"{self._axes}: {'the loss' if name == _LOSS else name}"
        return (
            f"{what} is another than in the whole model in the second forward, though not in the "
            "first: something that forwards go on with (a counter, a generator of your own, a "
            "tensor that is written in place) is changed by a part of the model that another rank "
            "has; change it where it is read, within one block, draw from torch's generator, or "
            f"write {self._one()}; {_insist(name)}"
        )

    @property
    def _axes(self) -> str:
        sizes = {"tp": self._mesh.tensor.size, "pp": self._mesh.pipe.size}
        return " and ".join(f"parallel.{axis} {size}" for axis, size in sizes.items() if size > 1)

    def _one(self) -> str:
        return "tp: 1" if self._mesh.tensor.size > 1 else "pp: 1"

    @property
    def _gradient_advice(self) -> str:
        if self._mesh.tensor.size == 1:
            return self._advice
        return (
            "the backward of an operation between its divided linears, such as of an "
            "autograd.Function or a hook on a tensor, counts, orders or mixes features, of which "
            "each rank has a slice: write `whole` for these linears in parallel.plan, or write "
            "tp: 1"
        )

    @property
    def _advice(self) -> str:
        if self._mesh.tensor.size == 1:
            return "write pp: 1"
        return (
            "an operation between its divided linears counts, orders or mixes features, of which "
            "each rank has a slice: write `whole` for these linears in parallel.plan, make it of "
            "each feature by itself, or write tp: 1"
        )


class _DiffersError(Exception):
    """A module, or the loss, is another than in the whole model.

    Attributes:
        name: of the module; "loss".
        how: by how much, in words.
    """

    def __init__(self, name: str, how: str, message: str) -> None:
        super().__init__(message)
        self.name = name
        self.how = how


def _insist(name: str) -> str:
    """Return how to train all the same, in words."""
    return f"if it is right, {TRUST}: [{name}] trains it all the same, which each start tells"


class _Found(NamedTuple):
    """What the divided model has come to.

    Attributes:
        loss: None where no rank has one.
        nodes: by the number of the call, as each rank that has run it has seen it.
    """

    loss: float | None
    nodes: dict[int, list[Seen]]

    @classmethod
    def of(cls, ranks: Sequence[Any]) -> _Found:
        """Put together what the ranks of one data-parallel place have told."""
        losses = [loss for loss, _ in ranks if loss is not None]
        nodes: dict[int, list[Seen]] = {}
        for _, seen in ranks:
            for number, values in seen.items():
                nodes.setdefault(int(number), []).append(Seen(*values))
        return cls(losses[0] if losses else None, nodes)


def _apart(expected: Seen, found: Sequence[Seen]) -> float:
    """Return how much of the norm differs; 0 where that cannot be told."""
    if not math.isfinite(expected.norm):
        return 0.0
    scale = max(expected.norm, 1e-12)
    if found and all(seen.numel == expected.numel for seen in found):
        norm = max(abs(seen.norm - expected.norm) for seen in found)
        tensors = max(distance(seen.sums, expected.sums) for seen in found)
        return max(norm, tensors) / scale
    if _has_slices_of_sequence(expected, found):
        pairs = zip(found, expected.slices, strict=True)
        tensors = max(distance(seen.sums, sums) for seen, sums in pairs)
        return tensors / scale
    if sum(seen.numel for seen in found) == expected.numel:  # slices
        norm = math.sqrt(math.fsum(seen.norm**2 for seen in found))
        return abs(norm - expected.norm) / scale
    return 0.0


def _has_slices_of_sequence(expected: Seen, found: Sequence[Seen]) -> bool:
    """Return whether each rank, in their order, has returned its equal part of the tokens."""
    if not expected.slices or len(found) != len(expected.slices):
        return False
    batch, tokens, *features = expected.shape
    part = [batch, tokens // len(found), *features]
    return all(list(seen.shape) == part for seen in found)


def _agree(whole: WholeForward, again: WholeForward) -> bool:
    """Return whether two forwards with the same random numbers have come to the same loss."""
    seconds = (whole.second, again.second)
    if seconds[0] is not None and seconds[1] is not None and not _agree(*seconds):  # type: ignore[arg-type]
        return False
    return _is_steady(whole.loss, again.loss)


def _is_steady(loss: float | None, again: float | None) -> bool:
    """Return whether the losses of two forwards with the same random numbers are the same."""
    first, second = loss or 0.0, again or 0.0
    return not math.isfinite(first) or math.isclose(first, second, rel_tol=_ROUNDING / 10)


def _reason(error: Exception) -> str:
    name, text = type(error).__name__, first_line(error)
    return text if isinstance(error, ZrunError) or text == name else f"{name}: {text}"


def not_compared(why: str, what: str = "") -> str:
    """Return the note of a run whose model is not compared."""
    return f"{what}{_NOT_COMPARED}{why}"


def why_not_compared(notes: Sequence[str]) -> str:
    """Return why a run's model is not compared; "": it is, its gradients perhaps not."""
    found = (note for note in notes if note.startswith(_NOT_COMPARED))
    return next(found, "").removeprefix(_NOT_COMPARED)


@contextmanager
def _with_values(
    built: Built, dtype: torch.dtype, device: torch.device, values: WholeValues | None
) -> Iterator[None]:
    """Give a built model its values, and its buffers, on the device inside.

    They are those of files, if `values` has them.
    """
    model = built.module
    in_fp32 = running_norm_params(model)
    made: dict[int, nn.Parameter] = {}
    before = [
        (module, dict(module._parameters), dict(module._buffers)) for module in model.modules()
    ]
    for name, param in model.named_parameters():
        own = torch.float32 if id(param) in in_fp32 else dtype
        read = None if values is None else values.read(name, param)
        value = built.read(name, param) if read is None else read
        value = value.detach().to(device, own)
        made[id(param)] = nn.Parameter(value, requires_grad=param.requires_grad)
    saved: dict[int, torch.Tensor] = {}  # buffers in files
    for name, buffer in persistent_buffers(model):
        read = None if values is None else values.read(name, buffer)
        if read is not None:
            saved[id(buffer)] = read
    try:
        for module, params, buffers in before:
            module._parameters.update(
                {key: None if p is None else made[id(p)] for key, p in params.items()}
            )
            module._buffers.update(
                {
                    key: None if b is None else saved.get(id(b), b).to(device)
                    for key, b in buffers.items()
                }
            )
        yield
    finally:
        for module, params, buffers in before:
            module._parameters.update(params)
            module._buffers.update(buffers)


@contextmanager
def _recomputing(model: nn.Module) -> Iterator[None]:
    """Have a model recompute its blocks inside, if it has some: one of them is in memory then."""
    blocks = repeated_blocks(model)
    if not blocks:
        yield
        return
    with apply_checkpointing(model, ActivationsConfig(checkpoint="full")):
        yield


@contextmanager
def _drawing_in(regions: Regions | None) -> Iterator[Callable[[], bool]]:
    """Have regions draw as in training inside; yield what says whether they have drawn."""
    if regions is None:
        yield lambda: False
        return
    with regions.watched() as has_drawn:
        yield has_drawn
