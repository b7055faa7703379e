"""Rendezvous of the ranks of a job."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from zrun_core.distributed.communicators import backend_timeout, set_defaults
from zrun_core.errors import PreflightError, RendezvousError
from zrun_core.hardware import accelerator
from zrun_core.spine.sections.guards import LimitsConfig


def join(rank: int, world_size: int, device: torch.device, limits: LimitsConfig) -> None:
    """Meet the other ranks where ZRUN_STORE says, or at torchrun's address without it.

    Args:
        world_size: number of ranks; one rank has nobody to meet.
        device: of this rank; a GPU becomes the current one.
        limits: seconds that ranks may take to arrive, and one collective to wait.

    Raises:
        PreflightError: this torch cannot train on the device.
        RendezvousError: not all of them came in time.
    """
    check_device(device, world_size)
    if accelerator.is_accelerator(device):
        accelerator.set_device(device)
    if world_size == 1:
        return
    patience = timedelta(seconds=limits.start_s)
    where = os.environ.get("ZRUN_STORE")
    set_defaults()
    store = None
    init_method: str | None = "env://"
    if where is not None:
        store = _open_store(where, rank, world_size, patience)
        init_method = None
    try:
        dist.init_process_group(
            accelerator.backend_name(device),
            store=store,
            init_method=init_method,
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=backend_timeout(device, limits.collective_s)),
        )
    except dist.DistStoreError as error:
        raise RendezvousError(
            f"not all {world_size} ranks arrived within {limits.start_s:g} s (limits.start_s): "
            f"{error}"
        ) from None


def check_device(device: torch.device, num_ranks: int) -> None:
    """Look whether a rank of several can train on `device`.

    Raises:
        PreflightError: this torch cannot.
    """
    if (why_not := accelerator.why_not(device, num_ranks)) is not None:
        raise PreflightError(f"device: {device.type}, but {why_not}; device: cpu trains without")


def _open_store(where: str, rank: int, world_size: int, patience: timedelta) -> Any:
    """Open the store that the agent names: a file of this host, or tcp://host:port.

    The listening socket of rank 0 is inherited. It is bound to one address, where torch's own would
    listen on all of them.

    Raises:
        RendezvousError: rank 0 is not there.
    """
    if not where.startswith("tcp://"):
        file_store = dist.FileStore(where, world_size)  # type: ignore[attr-defined]
        file_store.set_timeout(patience)
        return file_store
    host, _, port = where.removeprefix("tcp://").rpartition(":")
    listener = int(os.environ["ZRUN_STORE_FD"]) if rank == 0 else None
    try:
        return dist.TCPStore(  # type: ignore[attr-defined]
            host.strip("[]"),
            int(port),
            world_size,
            rank == 0,
            patience,
            wait_for_workers=False,
            master_listen_fd=listener,
        )
    except dist.DistError as error:
        reason = str(error).splitlines()[0]
        raise RendezvousError(
            f"rank 0 cannot be reached at {where} (limits.start_s, or a firewall): {reason}"
        ) from None
