"""The user's module on flat units: build it, run it, `backward`, `step`.

    sharded = ShardedModel(module, read, settings, mesh, comm)
    sharded.begin_step()
    with sharded.forward() as micro:
        loss = module(x, y)                       # plain calls of the user's module
    sharded.backward(loss, micro, boundary=True)  # boundary: the last backward of the step
    result = sharded.step(3e-4, weights, lambda sums: sums[0])

One mechanism serves the ZeRO stages 0-3 (Rajbhandari et al. 2020): `ZeroPolicy` answers the two
questions that tell them apart, and nothing else here knows the stage. `exchange.py` has the traffic
of each stage.

    auto_wrap     cuts the module into units           Gatherer   unshards and reshards them
    build_units   gives them memory, and fills it      Reducer    reduces their gradients
    FlatUnit      memory of one unit                   ModelGrad  norm of all gradients
    module_hooks  call gatherer and reducer            Updates    by the ShardedOptimizer
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import nn

from zrun_core.distributed.comm import Comm, CommPhase
from zrun_core.distributed.mesh import Mesh
from zrun_core.distributed.named_vector import NamedVector
from zrun_core.distributed.step_message import StepContribution, all_reduce_step
from zrun_core.memory.layout import NO_PARTS, ParamSlot
from zrun_core.memory.tensors import TensorPart
from zrun_core.optim.resolve import OptimizerSpec, Options
from zrun_core.tiers.copies import Copier, ThreadCopier
from zrun_core.zero.passes.autograd_driver import ImplicitPasses
from zrun_core.zero.passes.gather import Gatherer
from zrun_core.zero.passes.module_hooks import install
from zrun_core.zero.passes.running_buffers import RunningBuffers
from zrun_core.zero.passes.sliced_passes import SlicedPasses
from zrun_core.zero.reduce.model_grad import ModelGrad
from zrun_core.zero.reduce.nonfinite import Culprit, UnitNorms
from zrun_core.zero.reduce.reducer import Reducer
from zrun_core.zero.unit.micro_pass import MicroPass, PassKind
from zrun_core.zero.unit.places import places_of
from zrun_core.zero.unit.precision import LossScaler
from zrun_core.zero.unit.unit_params import is_read_in_place
from zrun_core.zero.update.sharded_optimizer import ShardedOptimizer
from zrun_core.zero.update.updates import Updates
from zrun_core.zero.wrap.auto_wrap import NO_CHUNKS, NO_GROUPS, repeated_blocks
from zrun_core.zero.wrap.sharding_config import ShardingConfig, wrap_plan
from zrun_core.zero.wrap.tiling import tiled_linears
from zrun_core.zero.wrap.unit_building import ReadParam, build_units


@dataclass(frozen=True)
class StepResult:
    """Result of one optimizer step. Tensors are 0-d and on the device: only reading them waits.

    Attributes:
        sums: the caller's numbers, summed over all ranks.
        grad_norm: global 2-norm of the gradient, before clipping; not finite after an overflow.
        skipped: bool: the update was not made.
        overflow: bool: because the scaled gradient is not finite.
        agreed: bool: all ranks gathered the same units in the same order.
    """

    sums: NamedVector
    grad_norm: torch.Tensor
    skipped: torch.Tensor
    overflow: torch.Tensor
    agreed: torch.Tensor


class ShardedModel:
    """A module whose parameters live in flat units.

    Attributes:
        module: the user's, with hooks.
        units: in order of registration.
        layouts: of the units.
        placements: of units whose states leave the device, by name.
        tiers: what the rank has beside its device; None if no state lives there.
        is_apart: the host tier is apart from a CPU: see `Tiers`.
        places: of the rank, in the groups that gather and reduce each unit.
        gatherer: unshards the units while the module runs.
        reducer: of their gradients; a checkpoint holds its state.
        grad: their gradients together.
        optimizer: of their shards.
        updates: by the optimizer, also those beside training.
        scaler: of the loss in fp16.
        running: buffers that forwards write.
        num_pushes: gradients of this rank by which an update elsewhere, or here, was made apart
            from the steps that all ranks make together.
        planned_rings: `ring_bytes` at the beginning.
    """

    def __init__(
        self,
        module: nn.Module,
        read: ReadParam,
        settings: ShardingConfig,
        mesh: Mesh,
        comm: Comm,
        *,
        first_unit: int = 0,
        table: Mapping[str, TensorPart] = NO_PARTS,
        chunk_of: Mapping[str, int] = NO_CHUNKS,
        groups_of: Mapping[str, str] = NO_GROUPS,
        apart: Copier | None = None,
    ) -> None:
        """Move the parameters of `module` into units, unit by unit.

        Args:
            module: on any device, also meta; its parameters keep their identity.
            read: full value of a parameter, by name, asked for once per parameter.
            first_unit: number of units of models before this one: messages are told apart by it.
            table: by parameter name, its part in a tensor of the whole model; absent: all of one.
            chunk_of: by parameter name, its chunk of a pipeline where the rank has several.
            groups_of: by parameter name, the groups of its unit, of `Mesh.own`, where those are not
                the usual ones.
            apart: copies to a host tier that is apart from a CPU: see `Tiers`.

        Raises:
            PreflightError: the states take more than a rank has.
            JobError: `unit_names` or `leaf_names` match no module.
        """
        self.module = module
        self.settings = settings
        self.mesh = mesh
        self.comm = comm
        self.places = places_of(comm, mesh)
        planned = wrap_plan(module, settings, self.places, table, chunk_of, groups_of)
        self.layouts = [unit.layout for unit in planned.units]
        if apart is None and comm.device.type == "cpu":
            apart = None if is_read_in_place("cpu", settings.placement) else ThreadCopier()
        self.is_apart = apart is not None
        self.units, self.placements, self.tiers, self._pool = build_units(
            planned.units, read, settings, mesh, comm, first_unit=first_unit, apart=apart
        )
        compiled = self._compiled_modules()
        self.gatherer = Gatherer(self.units, comm, settings.prefetch, sees_lookups=not compiled)
        self.reducer = Reducer(self.units, settings.states, settings.exchange, mesh, comm)
        self.gatherer.stale.update_order = lambda: self.reducer.order.forward
        self.updates = Updates(self.units, settings, self.reducer, comm, self.tiers)
        self.reducer.before_last_backward = self.updates.read_ahead
        self.planned_rings = self.ring_bytes
        watched: list[nn.Module] = []
        # A rank alone waits for no gradient, and lacks parameters only if they live elsewhere.
        comes_and_goes = any(unit.param.reshard_after_use for unit in self.units)
        if mesh.data.size > 1 or comes_and_goes:
            watched = [inner for inner in module.modules() if id(inner) not in compiled]
        install(module, self.units, planned.hooked, self.gatherer, self.reducer, watched=watched)
        for _, tiled in tiled_linears(module):
            tiled.read_whole_while(lambda: self.gatherer.running.active)

        self.optimizer: ShardedOptimizer
        if settings.optimizer is not None:
            groups: list[Options] = [{}, {"weight_decay": 0.0}]
            self.set_optimizer(settings.optimizer, groups, lambda slot: slot.group)
        self.scaler = LossScaler(settings.precision, comm.device)
        self.grad = ModelGrad(self.units, self.reducer, mesh, comm)
        self.running = RunningBuffers(module)
        self.num_pushes = 0

    def _compiled_modules(self) -> set[int]:
        """Return the identities of modules in compiled blocks, where access is not noticed."""
        if not self.settings.whole_blocks:
            return set()
        blocks = [block for _, block in repeated_blocks(self.module)]
        return {id(inner) for block in blocks for inner in block.modules()}

    def set_optimizer(
        self, spec: OptimizerSpec, groups: Sequence[Options], group_of: Callable[[ParamSlot], int]
    ) -> None:
        """Give the model its optimizer.

        Args:
            group_of: number of the group of a parameter.
        """
        self.settings = replace(self.settings, optimizer=spec)
        self.optimizer = ShardedOptimizer(
            self.units, spec, groups, group_of, self.reducer.ring, self.comm, self.mesh.tensor
        )
        self.updates.optimizer = self.optimizer

    def use_implicit_passes(self, accumulate: int) -> ImplicitPasses:
        """Let plain calls of the module and plain `loss.backward()` begin and end passes.

        Args:
            accumulate: backwards of one optimizer step.
        """
        return ImplicitPasses(
            self.module,
            self.gatherer,
            self.reducer,
            lambda: self.settings.precision.autocast(self.comm.device),
            accumulate,
        )

    def use_slices(self, loss: object = None) -> SlicedPasses:
        """Let the micro-batches of a step go through the model slice by slice.

        Args:
            loss: the user's loss function, which may have attributes.

        Raises:
            JobError: the model has no repeated blocks.
        """
        return SlicedPasses(
            self.module,
            loss,
            self.gatherer,
            self.reducer,
            lambda: self.settings.precision.autocast(self.comm.device),
            self.comm.device,
        )

    # One optimizer step

    def begin_step(self) -> None:
        """Forget the last step's gradients, and copy the buffers that a skipped step puts back."""
        if self.tiers is not None:
            self.tiers.worker.is_in_step = True
        self.grad.begin_step()
        self.gatherer.order.begin_step()
        self.running.begin_step()

    @contextmanager
    def forward(self, chunk: int = 0) -> Iterator[MicroPass]:
        """Run a training forward inside: `with sharded.forward() as micro: loss = module(x)`.

        The micro-batch is under way from now on. Forwards of others may come before its backward.

        Args:
            chunk: of a pipeline, that it goes through.
        """
        micro = MicroPass(chunk)
        self.gatherer.begin_pass(micro, PassKind.FORWARD)
        try:
            with self.settings.precision.autocast(self.comm.device):
                yield micro
            self.gatherer.calls.leave()
        except BaseException:
            self.gatherer.abandon(micro)
            raise

    def backward(self, loss: torch.Tensor, micro: MicroPass, *, boundary: bool) -> None:
        """Run the backward that ends `micro`. Gradients add up in the order of these calls.

        Args:
            loss: 0-d, of the forward of `micro`; it is scaled against underflow.
            boundary: this is the last backward of the optimizer step.
        """
        with self.backward_pass(micro, boundary=boundary):
            self.scaler.scaled(loss).backward()

    @contextmanager
    def backward_pass(self, micro: MicroPass, *, boundary: bool) -> Iterator[None]:
        """Run the backward that ends `micro` inside, whatever it begins with.

        Args:
            boundary: this is the last backward of the optimizer step, through its chunk.
        """
        self.gatherer.begin_pass(micro, PassKind.BACKWARD)
        self.reducer.foresee(micro)
        self.reducer.begin_backward(micro, boundary=boundary)
        yield
        self._end_backward(micro)

    def _end_backward(self, micro: MicroPass) -> None:
        self.reducer.end_backward(micro)
        self.gatherer.pins.release(micro)
        self.gatherer.end_pass()

    def contribute_zeros(self, *, boundary: bool) -> None:
        """Take part in the reductions of a micro-batch that this rank could not compute.

        The step is to be skipped. For stages 0 to 2 only, where parameters are not resharded
        between uses: there the order of collectives does not depend on what runs.

        Args:
            boundary: as for `backward`.
        """
        if not self.gatherer.running.in_backward:  # its forward raised, or did not begin
            self.gatherer.begin_pass(MicroPass(), PassKind.BACKWARD)
        micro = self.gatherer.running.micro
        self.gatherer.abandon(micro)
        if micro.grads is None:
            self.reducer.begin_backward(micro, boundary=boundary)
        self._end_backward(micro)

    def step(
        self,
        lr: float | None,
        sums: NamedVector,
        divisor_of: Callable[[NamedVector], torch.Tensor],
        scaler: LossScaler | None = None,
    ) -> StepResult:
        """Clip the gradient, update, and mark every unit stale.

        All ranks skip the update together if the gradient, or one of `sums`, is not finite, or if
        the divisor is 0. A skipped step leaves no trace: buffers that it wrote are put back.

        Args:
            lr: learning rate of all groups; None leaves each its own.
            sums: numbers of this rank, to be summed over all ranks in the step's message.
            divisor_of: from the summed numbers, the 0-d divisor of the gradient.
            scaler: what the loss was scaled by, if not by `backward`; its owner updates it.
        """
        scale = self.scaler if scaler is None else scaler
        self.comm.phase = CommPhase.STEP
        self.updates.wait()  # for those of the step before, where they are delayed
        elsewhere = self.grad.has_grad_elsewhere(self.reducer.sum_shared())
        has_grad = self.grad.has_grad_here()
        with self.comm.spans.named("norm of the gradient"):
            norm_here = self.grad.square_norm()
        schedule = self.gatherer.order.digest
        own = StepContribution(sums, norm_here, schedule, has_grad, elsewhere)
        reduced = all_reduce_step(own, self.mesh.data, self.mesh.world, self.comm)

        divisor = divisor_of(reduced.sums) * scale.scale.double()
        norm = reduced.square.sqrt() / divisor
        is_finite = torch.isfinite(reduced.square)
        overflow = ~is_finite & scale.enabled
        skipped = ~(is_finite & torch.isfinite(reduced.sums.values).all()) | (divisor == 0)
        if self.settings.clip is not None:
            divisor = divisor * (norm / self.settings.clip).clamp(min=1.0)
        with self.comm.waiting():  # only where a parameter got no gradient here
            has_grad_anywhere = self.grad.has_grad_anywhere(has_grad, reduced.num_with_grad)
        self.updates.make(lr, divisor.float(), skipped, has_grad_anywhere)
        self.running.end_step(skipped)
        if self.tiers is not None:
            self.tiers.worker.is_in_step = False
        if scaler is None:
            self.scaler.update(overflow)
        return StepResult(reduced.sums, norm, skipped, overflow, reduced.agreed)

    def settle_updates(self) -> None:
        """Wait for the updates that run beside training, and raise their errors.

        Whoever looks at parameters or at the optimizer's states between two steps calls it first.
        """
        self.updates.settle()

    # What went wrong

    def inspect_gradients(self, wanted: bool) -> None:
        """Inspect each rank's own gradient before it is summed, from now on, or stop doing so."""
        self.reducer.before_sum = self.grad.inspector.inspect if wanted else None

    def find_nonfinite(
        self,
        losses: Sequence[float] = (),
        is_late: bool = False,
    ) -> Culprit | None:
        """Find the parameter, or the rank's loss, for which the last step was skipped. Collective.

        Args:
            is_late: the next step's gradient is there already: only the unit is known.
        """
        self.settle_updates()
        if is_late:
            return self.grad.inspector.find_unit(losses)
        return self.grad.inspector.find(losses)

    def find_nonfinite_parameter(self) -> tuple[str, str] | None:
        """Return name and kind (inf, nan) of the first parameter that is not finite. Collective."""
        self.settle_updates()
        return self.grad.inspector.find_parameter()

    def look_back_at(self, norms: UnitNorms) -> None:
        """Let `find_nonfinite` find the unit, told late, by which an earlier update was judged."""
        self.grad.inspector.norms = norms

    # Outside of training steps

    @contextmanager
    def evaluation(self, chunk: int = 0) -> Iterator[None]:
        """Run forward passes without gradients inside.

        Args:
            chunk: of a pipeline, that they go through.
        """
        self.settle_updates()
        autocast = self.settings.precision.autocast(self.comm.device)
        with self.gatherer.evaluation(chunk), torch.no_grad(), autocast:
            yield

    @contextmanager
    def gathered(self) -> Iterator[nn.Module]:
        """Keep every parameter unsharded inside, to be read or written; writes are kept.

        Collective on entry and on exit; in between, ranks may do different things for different
        lengths of time. Every rank must write the same values, or leave writing an element to the
        rank that updates it.

        Raises:
            UserCodeError: a pass runs.
        """
        self.settle_updates()
        autocast = self.settings.precision.autocast(self.comm.device)
        with self.gatherer.whole.unsharded(), torch.no_grad(), autocast:
            try:
                yield self.module
            finally:
                if self.tiers is not None:  # what was written goes to homes elsewhere
                    self.updates.wait_for_readers()
        self._pool.shrink()

    @property
    def ring_bytes(self) -> tuple[int, int]:
        """Scratch that gathers hold now, and that reductions hold."""
        return self._pool.num_bytes, self.reducer.ring.num_bytes
