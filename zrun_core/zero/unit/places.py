"""This rank's places in the groups that gather and reduce its units: `places_of(comm, mesh)`."""

from __future__ import annotations

from zrun_core.distributed.comm import Comm, direct_up_to
from zrun_core.distributed.mesh import Mesh, UnitGroups
from zrun_core.memory.state_policy import MeshInfo, RankPlaces


def places_of(comm: Comm, mesh: Mesh) -> RankPlaces:
    """Return this rank's place in the groups of each unit, for `StatePolicy`."""

    def place_in(groups: UnitGroups) -> MeshInfo:
        return MeshInfo(
            shard_size=groups.shard.size,
            shard_index=groups.shard.index,
            num_replicas=groups.replicate.size,
            replica_index=groups.replicate.index,
            direct_up_to=direct_up_to(comm.device.type),
            tied_size=mesh.tied.size,
            tensor_size=mesh.tensor.size,
            tied_index=mesh.tied.index,
        )

    own = {name: place_in(groups) for name, groups in mesh.own.items()}
    return RankPlaces(place_in(mesh.groups_of("")), own)
