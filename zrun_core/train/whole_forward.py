"""What the whole model computes of the first micro-batch, on one rank and before it is divided.

A few samples of the micro-batch tell as much as all of them: see `first_samples`. Where the
forward takes no other number than that of the job, all of them are used.

[Note: which numbers are drawn]
Where the first ones make all tokens alike, as a mask drawn as 0 does, nothing that mixes them is
seen. The forwards are then made with the next ones.

[Note: a second forward]
Where the first one leaves something behind, as a counter or a generator's position, a second one
begins with that and is compared too: what a part of the model changes behind a border, another
part in front of it may never see.

[Note: models that are larger than a device]
Their blocks have values while they run, one at a time, as they are read from the host or from
files. That is enough for forwards: gradients are not compared then.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import nn

from zrun_core.activations.checkpoint import apply_checkpointing
from zrun_core.checkpoint.whole_values import WholeValues, within
from zrun_core.data.batch import copied
from zrun_core.distributed.mesh import Mesh
from zrun_core.distributed.rng import Streams
from zrun_core.errors import CheckpointError, JobError, UserCodeError, ZrunError
from zrun_core.sizes import format_size
from zrun_core.spine.sections.activations import ActivationsConfig
from zrun_core.spine.tracebacks import first_line
from zrun_core.stages.node_calls import DrawingWalk, Walk, installed_nodes, walking
from zrun_core.train.gradient_check import (
    NudgingWalk,
    SavedTensors,
    WholeGradients,
    noting_gradients,
    why_not_told,
)
from zrun_core.train.micro_batches import share_of
from zrun_core.train.model_values import TrialBytes, with_values
from zrun_core.train.node_values import Seen, Watch
from zrun_core.train.trial_forward import TrialForward
from zrun_core.user_code.build import Built
from zrun_core.user_code.loss import compute_loss
from zrun_core.user_code.trial import watched_state
from zrun_core.user_code.user import user_code
from zrun_core.zero.unit.precision import LossScaler
from zrun_core.zero.wrap.auto_wrap import repeated_blocks

ROUNDING = 1e-4  # relative difference that another order of sums may make, in fp32
_MOST_BYTES = 0.5  # of the memory that is free: more of it than this, and nothing is compared
_DRAWS = 6  # of random numbers that are tried


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


class WholeModel:
    """Runs the whole model on one rank.

    Attributes:
        path: of the files that its values were read from; None: it has those it was built with.
    """

    def __init__(
        self,
        trial: TrialForward,
        streams: Streams,
        mesh: Mesh,
        global_size: int,
        device: torch.device,
        reading_s: float,
    ) -> None:
        """
        Args:
            global_size: samples of a step.
            reading_s: how long values may be read from files, while the other ranks wait.
        """
        self._trial = trial
        self._streams = streams
        self._mesh = mesh
        self._global_size = global_size
        self._device = device
        self._reading_s = reading_s
        self.path: Path | None = None

    def run(
        self, built: Built, free_bytes: int, open_values: Callable[[], WholeValues] | None
    ) -> WholeForward:
        """Return what it comes to, or why it could not be computed.

        Args:
            free_bytes: of the device.
            open_values: returns the values that the run begins or goes on with; None: those that
                the model was built with.
        """
        model = built.module
        compute = self._trial.precision.compute
        needed = TrialBytes.of(model, compute)
        room = _MOST_BYTES * free_bytes
        by_block = needed.whole > room
        if by_block and self._least_bytes(needed) > room:
            return WholeForward(why_not=f"the whole model takes {format_size(needed.whole)}")
        try:
            why_no_gradients = why_not_told(model)  # its own parameters have the hooks
            if by_block:
                why_no_gradients = (
                    f"it takes {format_size(needed.whole)}, and has values a block at a time"
                )
            values = None
            if open_values is not None:
                began = time.monotonic()
                values = within(open_values(), self._reading_s, began)
                self.path = values.path
            with with_values(built, compute, self._device, values, by_block=by_block):
                return self._run_any(model, room - needed.whole, why_no_gradients)
        except CheckpointError as error:
            return WholeForward(why_not=_reason(error))
        except Exception as error:  # of one rank alone: the others would wait for it
            reason = f"on one rank its forward fails: {_reason(error)}"
            return WholeForward(why_not=reason)

    def _least_bytes(self, needed: TrialBytes) -> int:
        """Return the bytes of a forward by block, here, and then of a rank's own part."""
        here = needed.around + needed.block
        if not self._trial.widens:
            return here
        # What ranks have of the blocks is whole then on each: they gather it in one format.
        parts = self._mesh.tensor.size * self._mesh.pipe.size
        return max(here, needed.around + (needed.whole - needed.around) // parts)

    def _run_any(self, model: nn.Module, limit: float, why_no_gradients: str) -> WholeForward:
        """Return what the whole model comes to, of the first batch that its forward takes."""
        last = len(self._trial.batches) - 1
        while self._trial.which < last:
            with suppress(Exception):
                return self._run_whole(model, limit, why_no_gradients)
            self._trial.which += 1
        return self._run_whole(model, limit, why_no_gradients)

    def _run_whole(self, model: nn.Module, limit: float, why_no_gradients: str) -> WholeForward:
        """Return what the whole model comes to; activations may take `limit` bytes."""
        for draw in range(_DRAWS):
            whole = self._forward(model, draw)
            if whole.is_telling:
                break
        found, loss = replace(whole, why_no_gradients=why_no_gradients), math.nan
        if not why_no_gradients:
            found, loss = self._with_gradients(whole, model, limit)
        # The forward of the backward is another one with the same numbers, but for its format.
        is_same_forward = not (self._trial.widens or whole.draw or whole.second is not None)
        is_steady = is_same_forward and _is_steady(whole.loss, loss)
        if is_steady or _agree(whole, self._forward(model, whole.draw)):
            return found
        why_not = "its loss differs from one forward to the next with the same random numbers"
        return WholeForward(why_not=why_not)

    def _forward(self, model: nn.Module, draw: int) -> WholeForward:
        """Return what a forward comes to, and the next one if it leaves something behind."""
        with ExitStack() as stack:
            for context in self._trial.contexts(model):
                stack.enter_context(context)
            names_of_changed = watched_state(model, self._trial.loss)
            first = self._next_forward(model, draw)
            if not names_of_changed():
                return first
            return replace(first, second=self._next_forward(model, draw))

    def _next_forward(self, model: nn.Module, draw: int) -> WholeForward:
        watch = Watch(self._mesh.tensor.size)
        draws = self._streams.forwards
        with ExitStack() as stack:
            stack.enter_context(self._trial.precision.autocast(self._device))
            stack.enter_context(installed_nodes(model, repeated_blocks(model)))
            stack.enter_context(draws.of_micro(0, draw))
            stack.enter_context(walking(DrawingWalk(draws, watch)))
            loss = self._trial.loss_of(model)
        return WholeForward(float(loss), watch.read(), draw=draw)

    def _with_gradients(
        self, whole: WholeForward, model: nn.Module, limit: float
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
                    return self._backward(model, saved, walk(draws))
            except (UserCodeError, JobError):  # of blocks that cannot be, as with a cache
                return self._backward(model, saved, walk(draws))

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
        self, model: nn.Module, saved: SavedTensors, walk: Walk
    ) -> tuple[dict[str, torch.Tensor], float]:
        """Run a forward and its backward; return the rows of the gradients by name, and the loss.

        `saved` counts what the forward keeps, and `walk` goes through its nodes.
        """
        scaler = LossScaler(self._trial.precision, self._device)
        with ExitStack() as stack:
            rows = stack.enter_context(noting_gradients(model))
            for context in self._trial.contexts(model):
                stack.enter_context(context)
            with ExitStack() as forward:
                forward.enter_context(self._trial.precision.autocast(self._device))
                forward.enter_context(installed_nodes(model, repeated_blocks(model)))
                forward.enter_context(self._streams.forwards.of_micro(0, 0))
                forward.enter_context(walking(walk))
                forward.enter_context(saved)
                batch = replace(self._trial.batch, batch=copied(self._trial.batch.batch))
                with user_code("forward failed"):
                    loss = compute_loss(model, batch.batch, self._trial.loss, batch.num_samples)
                share = share_of(loss, batch, self._global_size)
            with user_code("backward failed"):
                scaler.scaled(share).backward()
        return rows, float(loss.value.detach())


def _agree(whole: WholeForward, again: WholeForward) -> bool:
    """Return whether two forwards with the same random numbers have come to the same loss."""
    seconds = (whole.second, again.second)
    if seconds[0] is not None and seconds[1] is not None and not _agree(*seconds):  # type: ignore[arg-type]
        return False
    return _is_steady(whole.loss, again.loss)


def _is_steady(loss: float | None, again: float | None) -> bool:
    """Return whether the losses of two forwards with the same random numbers are the same."""
    first, second = loss or 0.0, again or 0.0
    return not math.isfinite(first) or math.isclose(first, second, rel_tol=ROUNDING / 10)


def _reason(error: Exception) -> str:
    name, text = type(error).__name__, first_line(error)
    return text if isinstance(error, ZrunError) or text == name else f"{name}: {text}"


@contextmanager
def _recomputing(model: nn.Module) -> Iterator[None]:
    """Have a model recompute its blocks inside, if it has some: one of them is in memory then."""
    blocks = repeated_blocks(model)
    if not blocks:
        yield
        return
    with apply_checkpointing(model, ActivationsConfig(checkpoint="full")):
        yield
