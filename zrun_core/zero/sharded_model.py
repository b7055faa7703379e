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
    FlatUnit      memory of one unit                   Reducer    reduces their gradients
    module_hooks  call both while the module runs      ShardedOptimizer   updates their shards
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch
from torch import nn

from zrun_core.distributed.comm import Comm, CommPhase
from zrun_core.distributed.mesh import Mesh
from zrun_core.distributed.named_vector import NamedVector
from zrun_core.distributed.step_message import (
    StepContribution,
    all_reduce_stage,
    all_reduce_step,
)
from zrun_core.memory.buffers import ON_DEVICE, Buffer, Kind, Tier
from zrun_core.memory.layout import NO_PARTS, ParamSlot
from zrun_core.memory.placement import place
from zrun_core.memory.state_policy import StatePolicy, module_buffers
from zrun_core.memory.tensors import TensorPart
from zrun_core.memory.tier_traffic import Move, step_traffic
from zrun_core.optim.resolve import OptimizerSpec, Options
from zrun_core.tiers.copies import Copier
from zrun_core.tiers.tiers import TierCounts, Tiers
from zrun_core.tiers.transfer import DONE, Transfer
from zrun_core.zero.auto_wrap import NO_CHUNKS, WrapUnit, repeated_blocks
from zrun_core.zero.autograd_driver import ImplicitPasses
from zrun_core.zero.exchange import StepCounts, expected_traffic
from zrun_core.zero.gather import Gatherer
from zrun_core.zero.micro_pass import HeldGrad, HeldGrads, MicroPass, PassKind
from zrun_core.zero.module_hooks import install
from zrun_core.zero.nonfinite import Culprit, Inspector, UnitNorms
from zrun_core.zero.precision import LossScaler
from zrun_core.zero.reduce import Reducer, mesh_info_of
from zrun_core.zero.running_buffers import RunningBuffers
from zrun_core.zero.sharded_optimizer import Decision, ShardedOptimizer
from zrun_core.zero.sharding_config import (
    MemoryAccount,
    ShardingConfig,
    check_states_fit,
    planned_buffers,
    wrap_plan,
)
from zrun_core.zero.sliced_passes import SlicedPasses
from zrun_core.zero.unit import FlatUnit, moves_pages, window_pool
from zrun_core.zero.versions import Versions

# Holds the gradient of a parameter, which a call will make.
HoldGrad = Callable[[nn.Parameter, Callable[[], torch.Tensor]], None]


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


@dataclass(frozen=True)
class StageUpdate:
    """Result of the update of one stage of a pipeline alone. Tensors are 0-d and on the device.

    Attributes:
        square: float64, squared norm of the stage's gradient.
        skipped: bool: the update was not made, because that is not finite.
        norms: of its units, by which the skipped step's culprit can be found.
    """

    square: torch.Tensor
    skipped: torch.Tensor
    norms: UnitNorms


class ShardedModel:
    """A module whose parameters live in flat units.

    Attributes:
        module: the user's, with hooks.
        units: in order of registration.
        layouts: of the units.
        reducer: of their gradients; a checkpoint holds its state.
        optimizer: of their shards.
        scaler: of the loss in fp16.
        versions: of the parameters; several in a stage of PipeDream.
        num_updates: made or skipped so far; `delay_after` counts them.
        tiers: what the rank has beside its device; None if no state lives there.
        step_counts: what the newest step has moved between tiers. The updates that a step begins
            run beside the next one, and are counted there.
    """

    def __init__(
        self,
        module: nn.Module,
        read: Callable[[str, nn.Parameter], torch.Tensor],
        settings: ShardingConfig,
        mesh: Mesh,
        comm: Comm,
        *,
        first_unit: int = 0,
        table: Mapping[str, TensorPart] = NO_PARTS,
        chunk_of: Mapping[str, int] = NO_CHUNKS,
        apart: Copier | None = None,
    ) -> None:
        """Move the parameters of `module` into units, unit by unit.

        Args:
            module: on any device, also meta; its parameters keep their identity.
            read: full value of a parameter, by name, asked for once per parameter.
            settings: of sharding and of the update.
            mesh: the groups of this rank.
            comm: its collectives.
            first_unit: number of units of models before this one: messages are told apart by it.
            table: by parameter name, its part in a tensor of the whole model; absent: all of one.
            chunk_of: by parameter name, its chunk of a pipeline where the rank has several.
            apart: copies to a host tier that is apart from a CPU: see `Tiers`.

        Raises:
            PreflightError: the states take more than a rank has.
            JobError: `unit_names` or `leaf_names` match no module.
        """
        self.module = module
        self.settings = settings
        self.mesh = mesh
        self.comm = comm
        states = settings.states
        self._mesh_info = mesh_info_of(comm, mesh)
        planned = wrap_plan(module, settings, self._mesh_info, table, chunk_of)
        self.layouts = [unit.layout for unit in planned.units]
        moves = moves_pages(comm.device.type)
        check_states_fit(self.layouts, settings, mesh, comm)
        self._is_apart = apart is not None
        self._placements = place(self.layouts, settings.placement)
        self.tiers = self._make_tiers(apart)
        self.step_counts = TierCounts()
        pool_bytes = states.gather_ring_bytes(
            self.layouts, settings.prefetch, moves_pages=moves, placements=self._placements
        )
        self._pool = window_pool(comm.device, pool_bytes)
        self.units = [
            self._make_unit(index, unit, states, read)
            for index, unit in enumerate(planned.units, first_unit)
        ]
        self._trained = [unit for unit in self.units if unit.trainable]
        # Ranks along these axes hold equal copies of a unit: the first one counts it in norms.
        self._counted = [u for u in self._trained if mesh.is_first(u.layout.replicated_over)]

        compiled = self._compiled_modules()
        self._gatherer = Gatherer(self.units, comm, settings.prefetch, sees_lookups=not compiled)
        self.reducer = Reducer(self.units, states, settings.exchange, mesh, comm)
        self._gatherer.update_order = lambda: self.reducer.forward_order
        self.reducer.before_last_backward = self._read_ahead
        self.num_updates = 0
        self._planned_rings = self.ring_bytes
        self.versions = Versions(self.units, settings.versions)
        watched: list[nn.Module] = []
        if mesh.data.size > 1:  # a rank alone never lacks a parameter, nor waits for a gradient
            watched = [inner for inner in module.modules() if id(inner) not in compiled]
        install(module, self.units, planned.hooked, self._gatherer, self.reducer, watched=watched)

        self._before_update: list[Callable[[], None]] = []
        self._reading_ahead: Transfer = DONE
        self.optimizer: ShardedOptimizer
        if settings.optimizer is not None:
            groups: list[Options] = [{}, {"weight_decay": 0.0}]
            self.set_optimizer(settings.optimizer, groups, lambda slot: slot.group)
        self.scaler = LossScaler(settings.precision, comm.device)
        self._inspector = Inspector(self.units, comm, mesh.world, mesh.pipe)
        self._running = RunningBuffers(module)
        self._never: set[str] | None = None  # parameters without a gradient in any step so far

    def _make_tiers(self, apart: Copier | None) -> Tiers | None:
        """Reserve what the rank has beside its device, if a state lives there."""
        if not self._placements:
            return None
        device = self.comm.device
        sizes = self.settings.states.slot_sizes(
            self.layouts,
            self._mesh_info,
            self._placements,
            host_is_device=device.type == "cpu" and not self._is_apart,
        )
        disk = self.settings.disk_folder
        return Tiers(
            device,
            self._planned_buffers(),
            sizes,
            None if disk is None else Path(disk),
            apart=apart,
            board=self.comm.flight_recorder,
        )

    def _planned_buffers(self) -> list[Buffer]:
        """Return all that this rank allocates for its units, on every tier."""
        return planned_buffers(
            self.layouts,
            self.settings,
            self._mesh_info,
            self.comm.device,
            is_apart=self._is_apart,
        )

    def _make_unit(
        self,
        index: int,
        planned: WrapUnit,
        states: StatePolicy,
        read: Callable[[str, nn.Parameter], torch.Tensor],
    ) -> FlatUnit:
        """Allocate a unit, fill it, and make the module's parameters views of it."""
        unit = FlatUnit(
            index,
            planned.layout,
            planned.params,
            planned.leaf,
            policy=states,
            exchange=self.settings.exchange,
            shard=self.mesh.shard,
            replicate=self.mesh.replicate,
            mesh_info=self._mesh_info,
            device=self.comm.device,
            pool=self._pool,
            placement=self._placements.get(planned.layout.name, ON_DEVICE),
            tiers=self.tiers,
        )
        named = zip(planned.layout.slots, planned.params, strict=True)
        unit.load([read(slot.name, param) for slot, param in named])
        _materialise(planned.params, unit)
        unit.set_param_data()
        return unit

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
            spec: class and arguments.
            groups: options of each parameter group.
            group_of: number of the group of a parameter.
        """
        self.settings = replace(self.settings, optimizer=spec)
        self.optimizer = ShardedOptimizer(
            self.units, spec, groups, group_of, self.reducer.ring, self.comm, self.mesh.tensor
        )

    def use_implicit_passes(self, accumulate: int) -> ImplicitPasses:
        """Let plain calls of the module and plain `loss.backward()` begin and end passes.

        Args:
            accumulate: backwards of one optimizer step.
        """
        return ImplicitPasses(
            self.module,
            self._gatherer,
            self.reducer,
            lambda: self.settings.precision.autocast(self.comm.device),
            accumulate,
        )

    def use_slices(self) -> SlicedPasses:
        """Let the micro-batches of a step go through the model slice by slice.

        Raises:
            JobError: the model has no repeated blocks.
        """
        return SlicedPasses(
            self.module,
            self._gatherer,
            self.reducer,
            lambda: self.settings.precision.autocast(self.comm.device),
            self.comm.device,
        )

    # One optimizer step

    def begin_step(self) -> None:
        """Forget the last step's gradients, and copy the buffers that a skipped step puts back."""
        if self.tiers is not None:
            self.tiers.worker.is_in_step = True
        self._forget_gradients()
        self._gatherer.schedule_hash = 0
        self._running.begin_step()

    def _forget_gradients(self) -> None:
        for unit in self._trained:
            unit.grad.begin_step()
        self.reducer.begin_step()
        self._inspector.begin_step()

    @contextmanager
    def forward(self, chunk: int = 0) -> Iterator[MicroPass]:
        """Run a training forward inside: `with sharded.forward() as micro: loss = module(x)`.

        The micro-batch is under way from now on. Forwards of others may come before its backward.

        Args:
            chunk: of a pipeline, that it goes through.
        """
        micro = MicroPass(chunk)
        self._gatherer.begin_pass(micro, PassKind.FORWARD)
        try:
            with self.settings.precision.autocast(self.comm.device):
                yield micro
        except BaseException:
            self._gatherer.abandon(micro)
            raise

    def backward(self, loss: torch.Tensor, micro: MicroPass, *, boundary: bool) -> None:
        """Run the backward that ends `micro`. Gradients add up in the order of these calls.

        Args:
            loss: 0-d, of the forward of `micro`; it is scaled against underflow.
            micro: result of `forward`.
            boundary: this is the last backward of the optimizer step.
        """
        with self.backward_pass(micro, boundary=boundary):
            self.scaler.scaled(loss).backward()

    @contextmanager
    def backward_pass(self, micro: MicroPass, *, boundary: bool) -> Iterator[None]:
        """Run the backward that ends `micro` inside, whatever it begins with.

        Args:
            micro: result of `forward`.
            boundary: this is the last backward of the optimizer step, through its chunk.
        """
        self._gatherer.begin_pass(micro, PassKind.BACKWARD)
        self.reducer.begin_backward(micro, boundary=boundary)
        yield
        self._end_backward(micro)

    @contextmanager
    def input_pass(self, micro: MicroPass) -> Iterator[HoldGrad]:
        """Run the backward of `micro` inside, as far as other stages of a pipeline wait for it.

        The gradients of parameters are held, until `weight_pass`.

        Yields:
            What holds a gradient that is still to be made.
        """
        held = HeldGrads()
        places = self._places_of_params

        def hold(param: nn.Parameter, make: Callable[[], torch.Tensor]) -> None:
            unit, number = places[id(param)]
            if held.add(HeldGrad(unit, number, make)) and not unit.leaf:
                self._gatherer.post_backward(unit)

        self._gatherer.begin_pass(micro, PassKind.BACKWARD)
        micro.held = held
        yield hold
        self._gatherer.unpin(micro)
        self._gatherer.end_pass()

    def weight_pass(self, micro: MicroPass, *, boundary: bool) -> None:
        """Make the gradients that `input_pass` has held, and reduce them; this ends `micro`.

        Args:
            micro: of which `input_pass` has run.
            boundary: as of `backward_pass`.
        """
        held = micro.held
        assert held is not None
        micro.held = None
        self._gatherer.begin_pass(micro, PassKind.BACKWARD)
        self.reducer.begin_backward(micro, boundary=boundary)
        left = Counter((each.unit.index, each.number) for each in held.grads)
        for unit, number, make in held.grads:
            param = unit.params[number]
            with torch.no_grad():
                grad = make()
                param.grad = grad if param.grad is None else param.grad + grad
            left[unit.index, number] -= 1
            if not left[unit.index, number] and self.reducer.accumulate_grad(micro, unit, number):
                self.reducer.mark_complete(micro, unit)
        held.grads.clear()
        self._end_backward(micro)

    @cached_property
    def _places_of_params(self) -> dict[int, tuple[FlatUnit, int]]:
        """Return by identity of a parameter its unit, and its number there."""
        return {
            id(param): (unit, number)
            for unit in self._trained
            for number, param in enumerate(unit.params)
        }

    def _end_backward(self, micro: MicroPass) -> None:
        self.reducer.end_backward(micro)
        self._gatherer.unpin(micro)
        self._gatherer.end_pass()

    def contribute_zeros(self, *, boundary: bool) -> None:
        """Take part in the reductions of a micro-batch that this rank could not compute.

        The step is to be skipped. For stages 0 to 2 only, where parameters are not resharded
        between uses: there the order of collectives does not depend on what runs.

        Args:
            boundary: as for `backward`.
        """
        if not self._gatherer.in_backward:  # its forward raised, or did not begin
            self._gatherer.begin_pass(MicroPass(), PassKind.BACKWARD)
        micro = self._gatherer.micro
        self._gatherer.abandon(micro)
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
        for unit in self._trained:  # updates of the step before, where they are delayed
            unit.settle()
        self.reducer.sum_tied()
        has_grad = b"".join(unit.grad.has_grad for unit in self._trained)
        own = StepContribution(sums, self._square_norm(), self._gatherer.schedule_hash, has_grad)
        reduced = all_reduce_step(own, self.mesh.data, self.mesh.world, self.comm)

        divisor = divisor_of(reduced.sums) * scale.scale.double()
        norm = reduced.square.sqrt() / divisor
        is_finite = torch.isfinite(reduced.square)
        overflow = ~is_finite & scale.enabled
        skipped = ~(is_finite & torch.isfinite(reduced.sums.values).all()) | (divisor == 0)
        if self.settings.clip is not None:
            divisor = divisor * (norm / self.settings.clip).clamp(min=1.0)
        has_grad_anywhere = self._has_grad_anywhere(has_grad, reduced.num_with_grad)
        self._update(lr, divisor.float(), skipped, has_grad_anywhere)
        self._running.end_step(skipped)
        if self.tiers is not None:
            self.tiers.worker.is_in_step = False
        if scaler is None:
            self.scaler.update(overflow)
        return StepResult(reduced.sums, norm, skipped, overflow, reduced.agreed)

    def step_alone(self, lr: float) -> StageUpdate:
        """Update a stage of a pipeline by the newest micro-batch, without a word of other stages.

        The gradient is not clipped or divided. The stage's ranks skip the update together if it is
        not finite: the next version has the values of the last one.

        Args:
            lr: learning rate of all groups.
        """
        self.comm.phase = CommPhase.STEP
        has_grad_here = b"".join(unit.grad.has_grad for unit in self._trained)
        square, num_with_grad = all_reduce_stage(
            self._square_norm(), has_grad_here, self.mesh.data, self.comm
        )
        has_grad = self._has_grad_anywhere(has_grad_here, num_with_grad)
        skipped = ~torch.isfinite(square)
        one = torch.ones((), dtype=torch.float32, device=self.comm.device)
        self.versions.advance()
        self._update(lr, one, skipped, has_grad)
        if not self._skips_on_device and bool(skipped):
            self.versions.repeat()
        self._gatherer.refresh()
        self._forget_gradients()
        return StageUpdate(square, skipped, self._inspector.norms)

    def look_back_at(self, update: StageUpdate) -> None:
        """Let `find_nonfinite` find the unit, told late, by which an earlier update was judged."""
        self._inspector.norms = update.norms

    def end_steps_alone(self, skipped: torch.Tensor) -> None:
        """End micro-batches that were steps of their own: the pipeline is drained.

        Buffers that forwards wrote are put back to where they were before all of them, if an update
        was skipped: with several under way, nobody knows which of them wrote what.

        Args:
            skipped: 0-d bool: an update of this stage was.
        """
        self.versions.begin()
        self.versions.show(0)
        self._running.end_step(skipped)

    def settle_updates(self) -> None:
        """Wait for the updates that run beside training, and raise their errors.

        Whoever looks at parameters or at the optimizer's states between two steps calls it first.
        """
        if self._reading_ahead is not DONE:
            self._reading_ahead.wait()
            self._reading_ahead = DONE
            self.optimizer.forget_ahead()
        for unit in self._trained:
            unit.settle()

    def before_update(self, call: Callable[[], None]) -> None:
        """Call `call` once, before the next update, or what else changes states elsewhere."""
        self._before_update.append(call)

    def wait_for_readers(self) -> None:
        """Wait until no save reads what is about to change."""
        while self._before_update:
            self._before_update.pop()()

    def _update(
        self,
        lr: float | None,
        divisor: torch.Tensor,
        skipped: torch.Tensor,
        has_grad: list[bytes],
    ) -> None:
        """Update all units, unless the step is skipped.

        Args:
            lr: as for `step`.
            divisor: 0-d fp32, of the gradient.
            skipped: 0-d bool.
            has_grad: by unit, which parameters got a gradient on any rank.
        """
        self.comm.settle()  # other ranks may still read the parameters
        self.wait_for_readers()
        self._reading_ahead.wait()  # until it has begun, and is counted
        self._reading_ahead = DONE
        self.num_updates += 1
        with torch.no_grad():
            if self._skips_on_device:
                # The host does not wait: the device divides, and skips by itself.
                grad_scale = divisor.masked_fill(skipped, 1.0)
                self.optimizer.step(lr, has_grad, grad_scale, skipped.float())
            elif not bool(skipped):
                is_one = float(divisor) == 1.0
                self.optimizer.step(lr, has_grad, None if is_one else divisor, None)
        if self.tiers is not None:
            self.step_counts = self.tiers.take_counts()
        if self.optimizer.starts_updates:
            self._start_updates(lr, divisor, skipped, has_grad)
        for unit in self._trained:
            unit.mark_stale()

    def _read_ahead(self) -> None:
        """Begin to read what the first updates of this step need, beside the last backward."""
        if self.tiers is None or self.settings.optimizer is None or self._before_update:
            return  # or a save reads the disk
        if self.settings.schedule == "delayed":
            return  # `step` settles the last updates first: it needs slots, and the same records
        if self.optimizer.starts_updates:
            order = self.reducer.forward_order
            self._reading_ahead = self.optimizer.read_ahead(order, self.tiers)

    @property
    def _skips_on_device(self) -> bool:
        return self.comm.device.type != "cpu" and self.optimizer.scales_inside

    def _start_updates(
        self, lr: float | None, divisor: torch.Tensor, skipped: torch.Tensor, has_grad: list[bytes]
    ) -> None:
        """Begin the updates that run beside training."""
        assert self.tiers is not None
        delays = self.settings.schedule == "delayed"
        self.optimizer.start(
            lr,
            has_grad,
            _decision_of(divisor, skipped),
            self.reducer.forward_order,
            self.tiers,
            delayed=delays and self.num_updates > self.settings.delay_after,
        )
        if self.settings.schedule == "serial":
            self.settle_updates()

    def _square_norm(self) -> torch.Tensor:
        """Return this rank's part of the squared norm of the gradient, 0-d float64.

        Each element counts once over all ranks. Parts are the same at every stage, and so are the
        bits of the norm.
        """
        total = torch.zeros((), dtype=torch.float64, device=self.comm.device)
        evidence: list[tuple[list[FlatUnit], torch.Tensor]] = []
        if not self._trained:  # as on a stage of a pipeline that is frozen
            self._inspector.norms = evidence
            return total
        first = self._trained[0]
        for part in first.exchange.counted_parts(first.layout, first.mesh_info):
            norms: list[torch.Tensor] = []
            of_units: list[FlatUnit] = []
            for unit in self._counted:
                found = torch.stack(unit.grad.norms(part)).to(total.device)
                norms.append(found)
                of_units += [unit] * len(found)
            if norms:
                values = torch.cat(norms)
                total += values.double().square().sum()
                evidence.append((of_units, values))
        self._inspector.norms = evidence
        return total

    def _has_grad_anywhere(self, has_grad_here: bytes, counts: torch.Tensor) -> list[bytes]:
        """Return by unit which parameters got a gradient on any rank.

        Args:
            has_grad_here: a byte for each trainable parameter of this rank.
            counts: [parameters] on how many ranks each got one. The host reads them, and waits,
                only if some parameter got none here.
        """
        has_grad = has_grad_here
        if not all(has_grad_here):
            has_grad = bytes(count > 0 for count in counts.tolist())
        by_unit = []
        missing = set()
        start = 0
        for unit in self._trained:
            stop = start + len(unit.params)
            of_unit = has_grad[start:stop]
            by_unit.append(of_unit)
            for slot, has_one in zip(unit.layout.slots, of_unit, strict=True):
                if not has_one:
                    missing.add(slot.part.tensor)
            start = stop
        self._never = missing if self._never is None else self._never & missing
        return by_unit

    # What went wrong

    def inspect_gradients(self, wanted: bool) -> None:
        """Inspect each rank's own gradient before it is summed, from now on, or stop doing so."""
        self.reducer.inspector = self._inspector if wanted else None

    def find_nonfinite(
        self,
        losses: Sequence[float] = (),
        is_late: bool = False,
    ) -> Culprit | None:
        """Find the parameter, or the rank's loss, for which the last step was skipped. Collective.

        Args:
            losses: of this rank's micro-batches.
            is_late: the next step's gradient is there already: only the unit is known.
        """
        self.settle_updates()
        if is_late:
            return self._inspector.find_unit(losses)
        return self._inspector.find(losses)

    def find_nonfinite_parameter(self) -> tuple[str, str] | None:
        """Return name and kind (inf, nan) of the first parameter that is not finite. Collective."""
        self.settle_updates()
        return self._inspector.find_parameter()

    @property
    def without_gradient(self) -> list[str]:
        """Names of the trainable parameters that have never got a gradient on any rank."""
        return sorted(self._never or ())

    # Outside of training steps

    @contextmanager
    def evaluation(self, chunk: int = 0) -> Iterator[None]:
        """Run forward passes without gradients inside.

        Args:
            chunk: of a pipeline, that they go through.
        """
        self.settle_updates()
        autocast = self.settings.precision.autocast(self.comm.device)
        with self._gatherer.evaluation(chunk), torch.no_grad(), autocast:
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
        with self._gatherer.all_unsharded(), torch.no_grad(), autocast:
            try:
                yield self.module
            finally:
                if self.tiers is not None:  # what was written goes to homes elsewhere
                    self.wait_for_readers()
        self._pool.shrink()

    def expected_traffic(self, num_steps: int, num_micro_batches: int) -> dict[str, int]:
        """Return the bytes that this rank should have sent in training, by kind of collective.

        It holds for models whose modules each run once per forward, in any order of forwards and
        backwards, unless a parameter is accessed outside of its module: micro-batches under way
        share what one of them has pinned. Which units the passes need was recorded while they ran:
        frozen ones without a gradient are gathered once.

        Args:
            num_steps: optimizer steps.
            num_micro_batches: total of all steps.
        """
        return expected_traffic(
            self.layouts,
            self.settings.states,
            self.settings.exchange,
            StepCounts(num_steps, num_micro_batches, self._gatherer.num_refreshes),
            self._mesh_info,
            gathers=[self._gatherer.num_gathers(unit) for unit in self.units],
        )

    def planned_moves(self, micro_batches: int) -> dict[Move, int]:
        """Return the bytes that a step should move between tiers. It holds as `expected_traffic`.

        Args:
            micro_batches: of the step.
        """
        if self.tiers is None:
            return {}
        states = self.settings.states
        passes = 1 if states.layer_major else micro_batches
        return step_traffic(
            self.layouts,
            self._placements,
            states,
            self._mesh_info,
            micro_batches=micro_batches,
            gathers={unit.name: passes * self._gatherer.num_gathers(unit) for unit in self.units},
            host_is_device=self.tiers.host_is_device,
        )

    def planned_memory(self) -> MemoryAccount:
        """Return what this rank allocates according to the layouts."""
        account = MemoryAccount()
        account.add(self._planned_buffers())
        account.add(module_buffers(self.module))
        return account

    def allocated_memory(self) -> MemoryAccount:
        """Return what this rank has allocated."""
        account = MemoryAccount()
        for unit in self.units:
            account.add(unit.allocated())
        account.add(module_buffers(self.module))
        account.add([Buffer("rings", Kind.RING, sum(self.ring_bytes))])
        if self.tiers is not None:
            slots = self.tiers.slot_bytes
            account.add([Buffer("slots", Kind.RING, slots, Tier.HOST)])
        return account

    def own_tensors(self) -> Iterator[torch.Tensor]:
        """Yield the tensors in which this rank's states and scratch lie."""
        for unit in self.units:
            yield from unit.tensors()
        yield from self.reducer.ring.tensors
        yield from self.module.buffers()
        yield from self.optimizer.tensors()

    @property
    def ring_bytes(self) -> tuple[int, int]:
        """Scratch that gathers hold now, and that reductions hold."""
        return self._pool.num_bytes, self.reducer.ring.num_bytes

    def grown_rings(self) -> list[tuple[str, int, int]]:
        """Return purpose, planned bytes and held bytes of rings that grew beyond the plan."""
        rings = zip(("gathering", "reducing"), self._planned_rings, self.ring_bytes, strict=True)
        return [(purpose, planned, held) for purpose, planned, held in rings if held > planned]


def _decision_of(divisor: torch.Tensor, skipped: torch.Tensor) -> Callable[[], Decision]:
    """Return what waits until the host knows whether a step is made, and its divisor."""
    numbers = torch.stack([divisor, skipped.float()])
    arrived = None
    if numbers.is_cuda:
        on_device = numbers
        numbers = torch.empty_like(numbers, device="cpu", pin_memory=True)
        numbers.copy_(on_device, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record()

    def decide() -> Decision:
        if arrived is not None:
            arrived.synchronize()
        is_one = float(numbers[0]) == 1.0
        return Decision(None if is_one else numbers[0], bool(numbers[1]))

    return decide


def _materialise(params: Sequence[nn.Parameter], unit: FlatUnit) -> None:
    """Give meta parameters a device. They keep their identity, attributes and hooks.

    `torch.utils.swap_tensors` swaps attributes and hooks away, and refuses parameters with weak
    references (LSTM). The new parameter is made of `view.data`: a gather into the unit must not
    count as a change of what autograd has saved.
    """
    for param, view in zip(params, unit.views or unit._placeholders, strict=True):
        if param.device.type != "meta":
            continue
        hooks = param._backward_hooks
        late_hooks = param._post_accumulate_grad_hooks
        on_device = nn.Parameter(view.data, requires_grad=param.requires_grad)
        torch._C._swap_tensor_impl(param, on_device)
        param._backward_hooks = hooks
        param._post_accumulate_grad_hooks = late_hooks
