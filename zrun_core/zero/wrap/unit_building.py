"""Build the units of a model, and reserve what they take on each tier: `build_units(...)`."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from zrun_core.distributed.comm import Comm
from zrun_core.distributed.mesh import Mesh
from zrun_core.memory.arena import PagePool, StorageMeter
from zrun_core.memory.buffers import ON_DEVICE, Placement
from zrun_core.memory.layout import UnitLayout
from zrun_core.memory.placement import place
from zrun_core.memory.state_policy import RankPlaces
from zrun_core.tiers.copies import Copier
from zrun_core.tiers.tiers import Tiers
from zrun_core.zero.unit.flat_unit import FlatUnit
from zrun_core.zero.unit.places import places_of
from zrun_core.zero.unit.unit_params import moves_pages, window_pool
from zrun_core.zero.wrap.auto_wrap import WrapUnit
from zrun_core.zero.wrap.sharding_config import ShardingConfig, check_states_fit, planned_buffers

# Returns the full value of a parameter, by name.
ReadParam = Callable[[str, nn.Parameter], torch.Tensor]


class BuiltUnits(NamedTuple):
    """The units of a model, and what they share.

    Attributes:
        units: filled.
        placements: of those whose states leave the device, by name.
        tiers: what the rank has beside its device; None if no state lives there.
        pool: memory for units while they are unsharded.
    """

    units: list[FlatUnit]
    placements: Mapping[str, Placement]
    tiers: Tiers | None
    pool: PagePool | StorageMeter


def build_units(
    planned: Sequence[WrapUnit],
    read: ReadParam,
    settings: ShardingConfig,
    mesh: Mesh,
    comm: Comm,
    *,
    first_unit: int,
    apart: Copier | None,
) -> BuiltUnits:
    """Allocate units, fill them, and make the module's parameters views of them.

    Args:
        read: asked for once per parameter.
        first_unit: number of the first one.
        apart: copies to a host tier that is apart from a CPU: see `Tiers`.

    Raises:
        PreflightError: the states take more than a rank has.
    """
    layouts = [unit.layout for unit in planned]
    check_states_fit(layouts, settings, mesh, comm)
    states = settings.states
    places = places_of(comm, mesh)
    placements = place(layouts, settings.placement)
    tiers = None
    if placements:
        tiers = _make_tiers(layouts, placements, settings, places, comm, apart)
    pool_bytes = states.gather_ring_bytes(
        layouts,
        settings.prefetch,
        moves_pages=moves_pages(comm.device.type),
        placements=placements,
    )
    pool = window_pool(comm.device, pool_bytes)
    units = []
    for index, wrapped in enumerate(planned, first_unit):
        unit = FlatUnit(
            index,
            wrapped.layout,
            wrapped.params,
            wrapped.leaf,
            policy=states,
            exchange=settings.exchange,
            groups=mesh.groups_of(wrapped.layout.groups),
            mesh_info=places.of(wrapped.layout),
            device=comm.device,
            pool=pool,
            placement=placements.get(wrapped.layout.name, ON_DEVICE),
            tiers=tiers,
        )
        _fill(unit, read)
        if tiers is not None:
            # Of the unit, not of the model: an update that is under way holds its unit, and copies
            # parameters to the device when the model has gone already.
            weakref.finalize(unit, tiers.end).atexit = False
        units.append(unit)
    return BuiltUnits(units, placements, tiers, pool)


def _make_tiers(
    layouts: Sequence[UnitLayout],
    placements: Mapping[str, Placement],
    settings: ShardingConfig,
    places: RankPlaces,
    comm: Comm,
    apart: Copier | None,
) -> Tiers:
    """Reserve what the rank has beside its device."""
    is_apart = apart is not None
    sizes = settings.states.slot_sizes(
        layouts,
        places,
        placements,
        host_is_device=comm.device.type == "cpu" and not is_apart,
    )
    return Tiers(
        comm.device,
        planned_buffers(layouts, settings, places, comm.device, is_apart=is_apart),
        sizes,
        None if settings.disk_folder is None else Path(settings.disk_folder),
        apart=apart,
        board=comm.flight_recorder,
        spans=comm.spans,
    )


def _fill(unit: FlatUnit, read: ReadParam) -> None:
    """Fill a unit, and make the module's parameters views of it."""
    named = zip(unit.layout.slots, unit.params, strict=True)
    unit.load([read(slot.name, param) for slot, param in named])
    _materialise(unit)
    unit.param.show()


def _materialise(unit: FlatUnit) -> None:
    """Give meta parameters a device. They keep their identity, attributes and hooks.

    `torch.utils.swap_tensors` swaps attributes and hooks away, and refuses parameters with weak
    references (LSTM). The new parameter is made of `view.data`: a gather into the unit must not
    count as a change of what autograd has saved.
    """
    for param, view in zip(unit.params, unit.param.data(), strict=True):
        if param.device.type != "meta":
            continue
        hooks = param._backward_hooks
        late_hooks = param._post_accumulate_grad_hooks
        on_device = nn.Parameter(view.data, requires_grad=param.requires_grad)
        torch._C._swap_tensor_impl(param, on_device)
        param._backward_hooks = hooks
        param._post_accumulate_grad_hooks = late_hooks
