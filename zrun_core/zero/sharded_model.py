"""The user's module on flat units: build it, run it, `backward`, `step`.

    sharded = ShardedModel(module, read, settings, mesh, comm)
    sharded.begin_step()
    with sharded.forward() as micro:
        loss = module(x, y)                       # plain calls of the user's module
    sharded.backward(loss, micro, boundary=True)  # boundary: the last backward of the step
    result = sharded.step(3e-4, weights, lambda sums: sums[0])

One mechanism serves the ZeRO stages 0-3 (Rajbhandari et al. 2020): `ZeroPolicy` answers the two questions that tell
them apart, and nothing else here knows the stage. Elements moved per optimizer step, for P trainable parameters, K
micro-batches and N ranks, times (N-1)/N: stage 0 all-reduce P (2P sent); stage 1 gather P + reduce-scatter P; stage 2
gather P + reduce-scatter KP; stage 3 gather 2KP + reduce-scatter KP.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from zrun_core.distributed.comm import Comm, CommPhase
from zrun_core.distributed.mesh import Mesh
from zrun_core.distributed.named_vector import NamedVector
from zrun_core.distributed.step_message import StepContribution, all_reduce_step
from zrun_core.errors import PreflightError
from zrun_core.memory.buffers import Buffer, Kind
from zrun_core.memory.layout import (
    WHOLE,
    MeshInfo,
    ParamSlot,
    StatePolicy,
    UnitLayout,
    ZeroPolicy,
    module_buffers,
)
from zrun_core.memory.tensors import TensorPart
from zrun_core.optim.resolve import OptimizerSpec, Options
from zrun_core.spine.sizes import format_size
from zrun_core.zero.auto_wrap import WrapPlan, auto_wrap, repeated_blocks
from zrun_core.zero.autograd_driver import ImplicitPasses
from zrun_core.zero.exchange import Exchange, StepCounts, expected_traffic
from zrun_core.zero.gather import Gatherer
from zrun_core.zero.micro_pass import MicroPass, PassKind
from zrun_core.zero.module_hooks import install
from zrun_core.zero.nonfinite import Culprit, Inspector
from zrun_core.zero.precision import LossScaler, Precision
from zrun_core.zero.reduce import Reducer, mesh_info_of
from zrun_core.zero.running_buffers import RunningBuffers
from zrun_core.zero.sharded_optimizer import ShardedOptimizer
from zrun_core.zero.unit import FlatUnit, moves_pages, window_pool

_OWN_KINDS = (
    Kind.PARAM,
    Kind.GRAD,
    Kind.OPTIM,
    Kind.RING,
    Kind.BUFFER,
)  # of what a rank keeps from step to step
_NORM_CHUNK = 1 << 20  # elements that a CPU casts at a time: they stay in cache


@dataclass(frozen=True)
class ShardingConfig:
    """How a model is sharded and updated."""

    zero: ZeroPolicy
    precision: Precision
    optimizer: OptimizerSpec | None  # None: `ShardedModel.set_optimizer` gives it later
    bucket: int  # bytes of parameters
    clip: float | None = None
    no_decay: Sequence[str] = ()
    unit_names: Sequence[str] = ()
    leaf_names: Sequence[str] = ()
    persist_below: int = 0
    prefetch: int = 1
    whole_blocks: bool = False  # never hook inside a repeated block: it is compiled
    recomputes_blocks: bool = False  # activation checkpointing
    exchange: Exchange = field(default_factory=Exchange)
    memory_bytes: int | None = None  # that a rank may have on its device; None: it finds out

    @property
    def states(self) -> StatePolicy:
        states = StatePolicy(
            self.zero,
            self.precision.reduce,
            0,
            ownership=self.exchange,
            recomputes_blocks=self.recomputes_blocks,
        )
        if (chosen := self.optimizer) is None:
            return states
        return replace(
            states,
            moments=chosen.moments,
            moment_dtype=chosen.moment_dtype,
            updates_together=chosen.layer_wise,
        )

    def group_of(self, name: str) -> int:
        """Optimizer group of a parameter: 1 is without weight decay."""
        return int(any(re.search(pattern, name) for pattern in self.no_decay))


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step came to. Tensors are 0-d and on the device, so that nobody waits who does not look.

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


@dataclass
class MemoryAccount:
    """Bytes of one rank by kind."""

    by_kind: dict[Kind, int] = field(default_factory=lambda: dict.fromkeys(_OWN_KINDS, 0))

    def add(self, buffers: Sequence[Buffer]) -> None:
        for buffer in buffers:
            self.by_kind[buffer.kind] += buffer.num_bytes


def wrap_plan(
    model: nn.Module,
    settings: ShardingConfig,
    mesh_info: MeshInfo,
    table: Mapping[str, TensorPart] = WHOLE,
) -> WrapPlan:
    """Cut `model`, which may be on the meta device, as `ShardedModel` does."""
    return auto_wrap(
        model,
        dtype=settings.precision.compute,
        num_shards=mesh_info.shard_size,
        num_parts=settings.zero.num_parts(mesh_info),
        bucket=settings.bucket,
        unit_names=settings.unit_names,
        leaf_names=settings.leaf_names,
        persist_below=settings.persist_below,
        whole_blocks=settings.whole_blocks,
        group_of=settings.group_of,
        table=table,
    )


def check_room(model: nn.Module, settings: ShardingConfig, mesh: Mesh, comm: Comm) -> None:
    """Before anything of `model`, which may be on the meta device, is sharded.

    Raises:
        PreflightError: this rank has no room for the states.
    """
    if settings.memory_bytes is not None:
        planned = wrap_plan(model, settings, mesh_info_of(comm, mesh))
        check_states([unit.layout for unit in planned.units], settings, mesh, comm)


def check_states(
    layouts: Sequence[UnitLayout], settings: ShardingConfig, mesh: Mesh, comm: Comm
) -> None:
    """Before anything is allocated.

    Raises:
        PreflightError: the states alone take more than a rank has.
    """
    states, has = settings.states, settings.memory_bytes
    if has is None:
        return
    mesh_info, moves = mesh_info_of(comm, mesh), moves_pages(comm.device.type)
    buffers = states.rank_buffers(layouts, mesh_info, prefetch=settings.prefetch, moves_pages=moves)
    if (needed := sum(buffer.num_bytes for buffer in buffers)) > has:
        room = format_size(has) if has > 0 else "nothing left beside Python and torch"
        raise PreflightError(
            f"the model's states take {format_size(needed)} on this rank, which has {room}: "
            "zrun estimate says what would fit"
        )


class ShardedModel:
    """A module whose parameters live in flat units."""

    def __init__(
        self,
        module: nn.Module,
        read: Callable[[str, nn.Parameter], torch.Tensor],
        settings: ShardingConfig,
        mesh: Mesh,
        comm: Comm,
        *,
        first_unit: int = 0,
        table: Mapping[str, TensorPart] = WHOLE,
    ) -> None:
        """Move the parameters of `module` into units, unit by unit.

        Args:
            module: on any device, also meta; its parameters keep their identity.
            read: full value of a parameter, by name, asked for once per parameter.
            first_unit: number of units of models before this one, whose messages must not be taken for this one's.
            table: by parameter name, what it is of a tensor of the whole model; absent: all of one.
        """
        self.module, self.settings, self.mesh, self.comm = module, settings, mesh, comm
        states = settings.states
        mesh_info = mesh_info_of(comm, mesh)
        planned = wrap_plan(module, settings, mesh_info, table)
        self.layouts = [unit.layout for unit in planned.units]
        moves = moves_pages(comm.device.type)
        check_states(self.layouts, settings, mesh, comm)
        whole = states.gather_ring_bytes(self.layouts, settings.prefetch, moves_pages=moves)
        self._pool = window_pool(comm.device, whole)
        self.units: list[FlatUnit] = []
        for number, piece in enumerate(planned.units, first_unit):
            unit = FlatUnit(
                number,
                piece.layout,
                piece.params,
                piece.leaf,
                policy=states,
                exchange=settings.exchange,
                shard=mesh.shard,
                replicate=mesh.replicate,
                mesh_info=mesh_info,
                device=comm.device,
                pool=self._pool,
            )
            unit.load(
                [
                    read(slot.name, param)
                    for slot, param in zip(piece.layout.slots, piece.params, strict=True)
                ]
            )
            _materialise(piece.params, unit)
            unit.set_param_data()
            self.units.append(unit)
        blocks = [block for _, block in repeated_blocks(module)] if settings.whole_blocks else []
        compiled = {id(inner) for block in blocks for inner in block.modules()}
        watched = [inner for inner in module.modules() if id(inner) not in compiled]
        if mesh.data.size == 1:  # nobody is waited for with the gradient of what is looked at
            watched = []
        self._gatherer = Gatherer(self.units, comm, settings.prefetch, sees_lookups=not compiled)
        self.reducer = Reducer(self.units, states, settings.exchange, mesh, comm)
        self._planned_rings = self.ring_bytes
        install(module, self.units, planned.hooked, self._gatherer, self.reducer, watched=watched)
        self._trained = [unit for unit in self.units if unit.trainable]
        # In norms, of what several ranks hold alike the first one's copy counts.
        self._counted = [u for u in self._trained if mesh.is_first(u.layout.replicated_over)]
        self._before_update: list[Callable[[], None]] = []
        self.optimizer: ShardedOptimizer
        if settings.optimizer is not None:
            self.set_optimizer(
                settings.optimizer, [{}, {"weight_decay": 0.0}], lambda slot: slot.group
            )
        self.scaler = LossScaler(settings.precision, comm.device)
        self._inspector = Inspector(self.units, comm, mesh.world, mesh.pipe)
        self._running = RunningBuffers(module)
        self._never: set[str] | None = None

    def set_optimizer(
        self, chosen: OptimizerSpec, groups: Sequence[Options], group_of: Callable[[ParamSlot], int]
    ) -> None:
        """Give the model its optimizer, with `groups`, of which `group_of` gives a parameter's number."""
        self.settings = replace(self.settings, optimizer=chosen)
        self.optimizer = ShardedOptimizer(
            self.units, chosen, groups, group_of, self.reducer.ring, self.comm, self.mesh.tensor
        )

    def use_implicit_passes(self, accumulate: int) -> ImplicitPasses:
        """From now on plain calls of the module and plain `loss.backward()` begin and end their passes themselves."""
        return ImplicitPasses(
            self.module,
            self._gatherer,
            self.reducer,
            lambda: self.settings.precision.autocast(self.comm.device),
            accumulate,
        )

    # One optimizer step

    def begin_step(self) -> None:
        """Forget the last step's gradients, and keep what a skipped step is to put back."""
        for unit in self._trained:
            unit.begin_step()
        self.reducer.begin_step()
        self._gatherer.schedule_hash = 0
        self._inspector.begin_step()
        self._running.begin_step()

    @contextmanager
    def forward(self) -> Iterator[MicroPass]:
        """Context of one training forward: `with sharded.forward() as micro: loss = module(x)`.

        It gives the micro-batch that is under way from now on. Forwards of others may come before its backward.
        """
        micro = MicroPass()
        self._gatherer.begin_pass(micro, PassKind.FORWARD)
        try:
            with self.settings.precision.autocast(self.comm.device):
                yield micro
        except BaseException:
            self._gatherer.abandon(micro)
            raise

    def backward(self, loss: torch.Tensor, micro: MicroPass, *, boundary: bool) -> None:
        """Run the backward that ends `micro`. Gradients of micro-batches add up in the order of these calls.

        Args:
            loss: 0-d, of the forward of `micro`; it is scaled against underflow.
            micro: what `forward` gave.
            boundary: whether this is the last backward of the optimizer step.
        """
        self._gatherer.begin_pass(micro, PassKind.BACKWARD)
        self.reducer.begin_backward(micro, boundary=boundary)
        (loss * self.scaler.scale if self.scaler.enabled else loss).backward()
        self._end_backward(micro)

    def _end_backward(self, micro: MicroPass) -> None:
        self.reducer.end_backward(micro)
        self._gatherer.unpin(micro)
        self._gatherer.end_pass()

    def contribute_zeros(self, *, boundary: bool) -> None:
        """Take part in what the other ranks still do for a micro-batch that this one could not compute.

        It contributes zeros; the step is to be skipped. Only where parameters are not given up between uses (stages 0
        to 2): there the order of collectives does not depend on what runs.

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
        """Clip, update, and mark every unit stale.

        All ranks skip the update together if the gradient, or one of `sums`, is not finite, or if the divisor is 0. A
        skipped step leaves no trace: buffers that its passes wrote are what they were.

        Args:
            lr: learning rate of all groups; None leaves each its own.
            sums: numbers of this rank, to be summed over all ranks in the step's message.
            divisor_of: from the summed numbers, what the gradient is to be divided by.
            scaler: what the loss was scaled by, if not by `backward`; its owner updates it.
        """
        scale = self.scaler if scaler is None else scaler
        self.comm.phase = CommPhase.STEP
        got = b"".join(unit.has_grad for unit in self._trained)
        said = StepContribution(sums, self._square_norm(), self._gatherer.schedule_hash, got)
        heard = all_reduce_step(said, self.mesh.data, self.mesh.world, self.comm)

        divisor = divisor_of(heard.sums) * scale.scale.double()
        norm = heard.square.sqrt() / divisor
        is_finite = torch.isfinite(heard.square)
        overflow = ~is_finite & scale.enabled
        skipped = ~(is_finite & torch.isfinite(heard.sums.values).all()) | (divisor == 0)
        if self.settings.clip is not None:
            divisor = divisor * (norm / self.settings.clip).clamp(min=1.0)
        self._update(lr, divisor.float(), skipped, self._got_anywhere(got, heard.num_got))
        self._running.end_step(skipped)
        if scaler is None:
            self.scaler.update(overflow)
        return StepResult(heard.sums, norm, skipped, overflow, heard.agreed)

    def before_update(self, call: Callable[[], None]) -> None:
        """Call `call` once, before the next update, which alone changes the optimizer's state."""
        self._before_update.append(call)

    def _update(
        self, lr: float | None, divisor: torch.Tensor, skipped: torch.Tensor, got: list[bytes]
    ) -> None:
        self.comm.settle()
        while self._before_update:
            self._before_update.pop()()
        with torch.no_grad():
            if self.comm.device.type == "cpu" or not self.optimizer.scales_inside:
                if not bool(skipped):
                    grad_scale = None if float(divisor) == 1.0 else divisor
                    self.optimizer.step(lr, got, grad_scale, None)
            else:
                self.optimizer.step(lr, got, divisor.masked_fill(skipped, 1.0), skipped.float())
        for unit in self._trained:
            unit.mark_stale()

    def _square_norm(self) -> torch.Tensor:
        """This rank's part of the squared norm of the gradient, float64: each element counts once over all ranks."""
        total = torch.zeros((), dtype=torch.float64, device=self.comm.device)
        first, evidence = self._trained[0], []
        for part in first.exchange.counted_parts(first.layout, first.mesh_info):
            norms: list[torch.Tensor] = []
            of_units: list[FlatUnit] = []
            for unit in self._counted:
                found = _norms(unit.norm_part(part))
                unit.grad.drop()
                norms += found
                of_units += [unit] * len(found)
            if norms:
                values = torch.stack(norms)
                total += values.double().square().sum()
                evidence.append((of_units, values))
        self._inspector.norms = evidence
        return total

    def _got_anywhere(self, got_here: bytes, counts: torch.Tensor) -> list[bytes]:
        """By unit, which parameters got a gradient on any rank. The host reads `counts` only if some got none here."""
        if not all(got_here):
            got_here = bytes(count > 0 for count in counts.tolist())
        found, start = [], 0
        for unit in self._trained:
            found.append(got_here[start : start + len(unit.params)])
            start += len(unit.params)
        missing = {
            slot.name
            for unit, bits in zip(self._trained, found, strict=True)
            for slot, bit in zip(unit.layout.slots, bits, strict=True)
            if not bit
        }
        self._never = missing if self._never is None else self._never & missing
        return found

    def inspect_gradients(self, wanted: bool) -> None:
        """Whether to look at each rank's own gradient from now on, before it is summed: one more pass over it."""
        self.reducer.inspector = self._inspector if wanted else None

    def find_nonfinite(
        self,
        losses: Sequence[float] = (),
        is_late: bool = False,
    ) -> Culprit | None:
        """The parameter, or the rank's loss, because of which the last step was skipped. Collective.

        Args:
            losses: of this rank's micro-batches.
            is_late: the next step's gradient is there already: only the unit is known.
        """
        return self._inspector.find_unit(losses) if is_late else self._inspector.find(losses)

    def find_nonfinite_parameter(self) -> tuple[str, str] | None:
        """Name and kind (inf, nan) of the first parameter in training that is not finite itself. Collective."""
        return self._inspector.find_parameter()

    @property
    def without_gradient(self) -> list[str]:
        """Names of the trainable parameters that have never got a gradient on any rank, after at least one step."""
        return sorted(self._never or ())

    # Outside of training steps

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """Context of forward passes without gradients."""
        autocast = self.settings.precision.autocast(self.comm.device)
        with self._gatherer.evaluation(), torch.no_grad(), autocast:
            yield

    @contextmanager
    def gathered(self) -> Iterator[nn.Module]:
        """Every parameter is whole inside, to be read or written; what is written stays.

        Collective on entry and on exit; in between, ranks may do different things for different lengths of time. Every
        rank must write the same values, or leave writing an element to the rank that owns it.
        """
        with (
            self._gatherer.all_unsharded(),
            torch.no_grad(),
            self.settings.precision.autocast(self.comm.device),
        ):
            yield self.module
        self._pool.shrink()

    def expected_traffic(self, num_steps: int, num_micro_batches: int) -> dict[str, int]:
        """Bytes that this rank should have sent in so many training steps, by kind of collective.

        It holds for models whose modules each run once per forward, in any order of forwards and
        backwards, unless a parameter is looked at outside of its module: micro-batches under way
        share what one of them holds. See `exchange.py` for the formulas. Which units the passes need
        was seen while they ran: frozen ones without a gradient are gathered once.
        """
        how_often = StepCounts(num_steps, num_micro_batches, self._gatherer.num_refreshes)
        return expected_traffic(
            self.layouts,
            self.settings.states,
            self.settings.exchange,
            how_often,
            mesh_info_of(self.comm, self.mesh),
            gathers=[self._gatherer.num_gathers(unit) for unit in self.units],
        )

    def planned_memory(self) -> MemoryAccount:
        """What `layout` says this rank allocates."""
        states, account = self.settings.states, MemoryAccount()
        mesh_info = mesh_info_of(self.comm, self.mesh)
        account.add(
            states.rank_buffers(
                self.layouts,
                mesh_info,
                prefetch=self.settings.prefetch,
                moves_pages=moves_pages(self.comm.device.type),
            )
        )
        account.add(module_buffers(self.module))
        return account

    def own_tensors(self) -> Iterator[torch.Tensor]:
        """The tensors in which this rank's states and scratch lie."""
        for unit in self.units:
            yield from unit.tensors()
        yield from self.reducer.ring.tensors
        yield from self.module.buffers()
        yield from self.optimizer.tensors()

    @property
    def ring_bytes(self) -> tuple[int, int]:
        """What gathering holds now, and what reducing does."""
        return self._pool.num_bytes, self.reducer.ring.num_bytes

    def grown_rings(self) -> list[tuple[str, int, int]]:
        """Rings of which passes have needed more than was planned: what each is for, bytes planned, and held."""
        rings = zip(("gathering", "reducing"), self._planned_rings, self.ring_bytes, strict=True)
        return [(purpose, planned, held) for purpose, planned, held in rings if held > planned]

    def allocated_memory(self) -> MemoryAccount:
        """What this rank has allocated."""
        account = MemoryAccount()
        for unit in self.units:
            account.add(unit.allocated())
        account.add(module_buffers(self.module))
        account.add([Buffer("rings", Kind.RING, sum(self.ring_bytes))])
        return account


def _norms(part: torch.Tensor) -> list[torch.Tensor]:
    """2-norms of pieces of `part`, 0-d fp32: all of it, except on a CPU."""
    if part.device.type == "cpu":
        return [torch.linalg.vector_norm(chunk.float()) for chunk in part.split(_NORM_CHUNK)]
    return [torch.linalg.vector_norm(part, dtype=torch.float32)]


def _materialise(params: Sequence[nn.Parameter], unit: FlatUnit) -> None:
    """Give meta parameters a device. They keep their identity, attributes and hooks.

    `torch.utils.swap_tensors` swaps attributes and hooks away, and refuses parameters with weak references (LSTM).
    A parameter must not count a gather into the unit as a change of what autograd has saved: hence `data`.
    """
    for param, view in zip(params, unit.views or unit._placeholders, strict=True):
        if param.device.type == "meta":
            hooks, late_hooks = param._backward_hooks, param._post_accumulate_grad_hooks
            torch._C._swap_tensor_impl(
                param, nn.Parameter(view.data, requires_grad=param.requires_grad)
            )
            param._backward_hooks, param._post_accumulate_grad_hooks = hooks, late_hooks
