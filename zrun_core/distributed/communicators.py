"""Communicators of NCCL for all groups of a mesh: made in one order before step 1, and their end.

[Note: communicators in one order]
A process group of NCCL is a name until something is sent in it. Its first collective makes a
communicator of its ranks, and the first message between two of them one of these two; meanwhile
the host waits for the others. Inside of the first step kernels of other communicators may be
waiting already, for ranks whose hosts wait here, and nobody comes through: Megatron-LM#5240.
So `connect` sends a number through each of them, in one order on all ranks, when nothing else runs:

    groups      world, data, tensor, shard, replicate, tied, host
    messages    of each pipe from the first stage to the last; last stage and first, where it wraps;
                the first replica and each other one, where it has a hub

Groups with the same ranks are one, and are met once. Nobody reads the numbers: the host has met the
others when a call returns, and what the device has still to do all ranks have been given in one
order. What a communicator takes of a device is there from the beginning, so that what does not fit
fails before the first step; the plan has it: `ParallelDims.communicators`.

[Note: limits of NCCL]
Waits on NCCL never fail by themselves: see `guards/watchdog.py`. torch ends a process whose work
takes longer than its group may, by SIGABRT. It would not say for what it waited, so it gets
`MARGIN_S` more than the rank's own watchdog, and is left for what that one cannot see: collectives
that the user's code issues by itself.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, MutableMapping, Sequence

import torch

from zrun_core.distributed.comm import Comm
from zrun_core.distributed.mesh import Mesh
from zrun_core.distributed.transport import Group
from zrun_core.hardware import accelerator

MARGIN_S = 120.0

# Unless the shell or the job says otherwise.
NCCL_DEFAULTS = {
    # Before it ends a process torch waits four times as long for a dump of its own recorder, which
    # it writes to /tmp. The pages of zrun's say more, and no file stays behind.
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "500",
}


def set_defaults(environ: MutableMapping[str, str] = os.environ) -> None:
    """Set what torch reads when the first process group is made."""
    for name, value in NCCL_DEFAULTS.items():
        environ.setdefault(name, value)


def waits_fail(device: torch.device) -> bool:
    """Return whether waiting for a rank that has ended fails by itself."""
    return not accelerator.is_accelerator(device)


def backend_timeout(device: torch.device, limit_s: float) -> float:
    """Return the seconds after which the backend gives up: see [Note: limits of NCCL].

    Args:
        limit_s: that one collective may wait for other ranks.
    """
    return limit_s if waits_fail(device) else limit_s + MARGIN_S


def connect(comm: Comm, mesh: Mesh, *, wraps: bool = False, has_hub: bool = False) -> None:
    """Make all communicators. Collective; see [Note: communicators in one order].

    Args:
        wraps: the last stage of a pipeline sends on to the first.
        has_hub: the first replica exchanges messages with each other one.
    """
    if waits_fail(comm.device):
        return  # gloo connects all ranks when a process group is made
    connect_groups(comm, _for_collectives(mesh))
    number = torch.zeros(1, device=comm.device)
    with comm.waiting():
        for group, sender, receiver in _for_messages(mesh, wraps=wraps, has_hub=has_hub):
            if group.index == sender:
                comm.send(number, receiver, group, number=0, name="connect").wait()
            elif group.index == receiver:
                comm.receive(number, sender, group, number=0, name="connect").wait()


def connect_groups(comm: Comm, groups: Sequence[Group]) -> None:
    """Make the communicators of groups over which ranks sum and gather. Collective.

    Args:
        groups: in one order on all ranks; those that share a process group are one.
    """
    if waits_fail(comm.device):
        return
    apart = {id(group.process_group): group for group in groups if group.size > 1}
    number = torch.zeros(1, device=comm.device)
    with comm.waiting():
        for group in apart.values():
            number = comm.all_reduce_small(number, group, name="connect")


def _for_collectives(mesh: Mesh) -> tuple[Group, ...]:
    """Return the groups over which ranks sum and gather, in one order on all of them."""
    return (
        *(mesh.world, mesh.data, mesh.tensor, mesh.shard),
        *(mesh.replicate, mesh.tied, mesh.host),
        *(group for groups in mesh.own.values() for group in groups),
    )


def _for_messages(mesh: Mesh, *, wraps: bool, has_hub: bool) -> Iterator[tuple[Group, int, int]]:
    """Yield the groups in which two ranks exchange messages, and their places in it."""
    size = mesh.pipe.size
    for group in (mesh.pipe, mesh.pipe_back):
        for stage in range(size - 1):
            yield group, stage, stage + 1
    if wraps and size > 1:
        for group in (mesh.pipe_wrap, mesh.pipe_back_wrap):
            yield group, 0, size - 1
    if has_hub:
        for replica in range(1, mesh.replicate.size):
            yield mesh.replicate, 0, replica
