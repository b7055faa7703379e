"""NCCL between simulated GPUs: torch's backend `nccl`, with the rules, the hangs and the texts.

wire.py            sockets between the ranks of a communicator
collectives.py     what kernels do on them: sums in the order of the ranks
communicator.py    a stream and a wire; kernels that never end until they are aborted
process_group.py   `ProcessGroupNCCL`: communicators per group and per pair, no tags
watchdog.py        torch's threads that end a process which waits too long, and their texts
settings.py        what SIMULATED_GPU says of NCCL
"""

from __future__ import annotations


def install() -> None:
    """Give `torch.distributed` the backend `nccl`. After torch was imported."""
    from simulated_gpu.nccl import process_group

    process_group.install()
