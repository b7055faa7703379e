"""Waits that no scenario can notice, each with the reason why it stays in the product.

Two kinds, each by name of the wait (see `Site.name`). `NOT_NOTICED`: it is waited for there, and
another wait does as well, or what it protects from is no order of a device. `NOT_REACHED`: in no
scenario does anybody wait there for a device, the worker or the disk; by the file where that holds
for all of one.
"""

from __future__ import annotations

from typing import NamedTuple

from mutation.sites import Site

_CPU = "only on CPUs: there others read a rank's memory"
_HOST = "waits for threads or processes of the host; tests of saves and of the launcher have it"
_ASYNC = "an asynchronous server trains on CPUs: `zrun/placement/late_updates.py` refuses GPUs"

NOT_NOTICED: dict[str, str] = {
    "activations/kept.py _OnHost.given_up: self._leaving.wait()": (
        "the room's next copy down follows in the stream, or the thread, that copiers have for "
        "each way; [Note: no record_stream] asks it of those who use a copier of any kind"
    ),
    "distributed/communicators.py connect: comm.read(number)": (
        "communicators are there when they are asked for something; it keeps the first messages "
        "out of the first step, and its time"
    ),
    "distributed/communicators.py connect_groups: comm.read(number)": (
        "as in `connect`: of no number, but of when the first step begins"
    ),
    "stages/links.py StageLinks.flush: handle.wait()": (
        "torch holds what NCCL sends until it is sent: the watchdog gives up a work that nobody "
        "has waited for when it is over; on CPUs others read it until then"
    ),
    "tensor_parallel/column_grads.py _Begin.backward: wait()": (
        "sums over one group follow each other in NCCL's stream, and the last one is waited for; "
        "on CPUs all have one tag"
    ),
}

NOT_REACHED: dict[str, str] = {
    "checkpoint/checkpointer.py": _HOST,
    "checkpoint/model_state.py": _HOST,
    "checkpoint/pruner.py": _HOST,
    "distributed/cma_transport.py": _CPU,
    "distributed/collectives.py PairwiseCollectives.all_gather_rows: self._comm.wait_for("
    "_exchange_all(outgoing, received, gro...": _CPU,
    "distributed/comm.py Comm.settle: self.wait_for(unread)": _CPU,
    "distributed/line.py Line.receive: work.wait()": _ASYNC,
    "distributed/line.py Line.send: work.wait()": _ASYNC,
    "guards/watchdog.py": _HOST,
    "library/device_check.py": "of `zrun doctor --gpu`, which test_boards.py runs",
    "parameter_server/server.py": _ASYNC,
    "plan/trace/trace_process.py": _HOST,
    "spine/tracker_process.py": _HOST,
    "tensor_parallel/tensor_comm.py TensorComm.gather_rows: self._comm.settle()": _CPU,
    "tiers/slots.py Slots._wait: self._changed.wait(_LOOK_S)": "until a thread gives a piece back",
    "tiers/swap_file.py _BlockTransfer.wait: self._over.wait()": (
        "is what a transfer of the disk waits by: taken out for those who call it"
    ),
    "tiers/swap_file.py SwapFile.close: self._changed.wait_for(lambda: not self._num_open)": _HOST,
    "train/async_windows.py": _ASYNC,
    "train/trainer.py": _HOST,
    "zero/passes/gather.py Gatherer._refresh_stale: unit.param.wait_for_unshard()": (
        "for compiled blocks, which the simulated device has not"
    ),
    "zero/passes/gather.py Gatherer.all_unsharded: self._comm.settle()": _CPU,
    "zero/unit/home_elsewhere.py OnDisk.store: self._merging.wait_on_host()": _CPU,
    "zero/unit/home_elsewhere.py _All.wait: transfer.wait()": _CPU,
    "zero/sharded_model.py ShardedModel.gathered: self.updates.wait_for_readers()": _HOST,
    "zero/update/sharded_optimizer.py ShardedOptimizer.set_options: "
    "update.unit.update_side.wait()": (
        "a backward has waited, before gradients changed, and a step without one is refused"
    ),
    "zero/unit/unit_params.py UnitParams.reshard: self._comm.settle()": _CPU,
    "zero/update/updates.py Updates.make: self._comm.settle()": _CPU,
    "zero/update/updates.py Updates.make: self.wait_for_readers()": _HOST,
    "zero/update/updates.py Updates.wait_for_readers: wait()": _HOST,
}


class Reason(NamedTuple):
    """Why a wait may go unnoticed.

    Attributes:
        text: "" if there is no reason.
        only_unreached: it counts only where nobody waits at the site.
    """

    text: str
    only_unreached: bool


def reason(site: Site) -> Reason:
    """Return the reason of a wait."""
    if site.name in NOT_NOTICED:
        return Reason(NOT_NOTICED[site.name], only_unreached=False)
    return Reason(NOT_REACHED.get(site.name, NOT_REACHED.get(site.file, "")), only_unreached=True)
