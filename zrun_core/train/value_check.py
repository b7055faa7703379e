"""Compare, before the first step, what a divided model computes with what the whole one does.

    rank 0, before the model is divided     all ranks, once they have their parts
    forward of the first micro-batch        the same forward, by the runtime's own passes
    of each node: its norm, some sums       the same, of the nodes of each rank

A plan of slices that is wrong keeps all shapes as often as not, and a number that is lost between
two stages has no shape at all. Their values tell. Both forwards begin with the same values, batch
and random numbers, and leave no trace: `whole_forward.py` and `trial_forward.py`.

Gradients are compared behind the forwards: see `gradient_check.py`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from zrun_core.checkpoint.whole_values import WholeValues
from zrun_core.data.batch import MicroBatch, copied, digest
from zrun_core.distributed.mesh import Mesh
from zrun_core.distributed.rng import Streams
from zrun_core.errors import JobError
from zrun_core.hardware import accelerator
from zrun_core.tensor_parallel.divide import Divided
from zrun_core.tensor_parallel.regions import Regions
from zrun_core.train.gradient_check import PartialGradients, compare_gradients
from zrun_core.train.micro_batches import MicroBatchRunner
from zrun_core.train.node_values import Seen, Watch, apart, has_slices_of_sequence
from zrun_core.train.trial_forward import TrialForward
from zrun_core.train.whole_forward import ROUNDING, WholeForward, WholeModel
from zrun_core.user_code.build import Built
from zrun_core.user_code.loss import LossFunction
from zrun_core.zero.sharded_model import ShardedModel
from zrun_core.zero.unit.precision import Precision
from zrun_core.zero.wrap.auto_wrap import repeated_blocks

TRUST = "guards.trust"
_LOSS = "loss"  # its name in `TRUST`
_SEQUENCE_ADVICE = (
    "an operation outside of attention counts, orders or mixes tokens, of which each rank has a "
    "slice, or features: write parallel.sequence: false"
)
_PATIENCE = 1 / 4  # of what ranks wait for each other, as long as one reads values of files
_ITS_GRADIENTS = "its gradients are "
_NOT_COMPARED = "not compared before training with what the whole model computes: "


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
        self._trial = TrialForward(batches, loss, precision, mesh, is_compiled=is_compiled)
        self._global_size = global_size
        self._streams = streams
        self._mesh = mesh
        self._trust = trust
        self._reading_s = _PATIENCE * patience_s
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
            free_bytes, open_values: as of `WholeModel.run`.
        """
        if self._mesh.world.index:
            return
        model = WholeModel(
            self._trial, self._streams, self._mesh, self._global_size, device, self._reading_s
        )
        self.whole = model.run(built, free_bytes, open_values)
        self._path = model.path
        if accelerator.is_accelerator(device):
            accelerator.empty_cache()  # the shards need it

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
        own = [
            self._trial.which,
            forwards,
            whole.why_not,
            whole.draw,
            of_gradients,
            why_no_gradients,
        ]
        told = comm.all_gather_bytes(json.dumps(own).encode(), self._mesh.world, name="whole model")
        which, forwards, why_not, draw, of_gradients, why_no_gradients = json.loads(told[0])
        self._trial.which = which
        if why_not:
            return [not_compared(why_not)]
        if divided is not None:
            self._check_all_ran(divided, model, forwards)
        seen = []
        with ExitStack() as stack:
            if self._trial.widens:  # what gathers parameters within a forward keeps their format
                stack.enter_context(sharded.gathered())
            for context in self._trial.contexts(model):
                stack.enter_context(context)
            regions = None if divided is None else divided.regions
            has_drawn = stack.enter_context(_drawing_in(regions))
            for _ in forwards:
                watch = Watch()
                loss = runner.trial(lambda: self._trial.loss_of(model), watch, draw)
                seen.append((None if loss is None else float(loss), watch.read()))
        mine = [seen, self._mesh.data.index, has_drawn(), digest(self._trial.batch.batch)]
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
        batch = replace(self._trial.batch, batch=copied(self._trial.batch.batch))
        with ExitStack() as stack:
            for context in self._trial.contexts(sharded.module):
                stack.enter_context(context)
            runner.trial_step(batch, partial.see)
        compute = self._trial.precision.compute
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
            share = apart(expected, seen)
            if share > ROUNDING:
                advice = self._advice
                if has_slices_of_sequence(expected, seen):
                    advice = _SEQUENCE_ADVICE
                how = f"{share:.2g} of its norm differs"
                name = expected.name or _LOSS  # a model without blocks is one node
                raise _DiffersError(
                    name,
                    f"of what it returns for the first micro-batch, {how}",
                    f"{axes}: {expected.name or 'the model'} computes something else than in the "
                    f"whole model: of what it returns for the first micro-batch, {how}; {advice}; "
                    + _insist(name),
                )
        if found.loss is None or not math.isfinite(whole_loss):
            return
        share = abs(found.loss - whole_loss) / max(abs(whole_loss), 1e-6)
        if share > ROUNDING:
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


def not_compared(why: str, what: str = "") -> str:
    """Return the note of a run whose model is not compared."""
    return f"{what}{_NOT_COMPARED}{why}"


def why_not_compared(notes: Sequence[str]) -> str:
    """Return why a run's model is not compared; "": it is, its gradients perhaps not."""
    found = (note for note in notes if note.startswith(_NOT_COMPARED))
    return next(found, "").removeprefix(_NOT_COMPARED)


@contextmanager
def _drawing_in(regions: Regions | None) -> Iterator[Callable[[], bool]]:
    """Have regions draw as in training inside; yield what says whether they have drawn."""
    if regions is None:
        yield lambda: False
        return
    with regions.watched() as has_drawn:
        yield has_drawn
