"""Waits that no scenario can notice, each with the reason why it stays in the product.

Two kinds, each by name of the wait (see `Site.name`). `NOT_NOTICED`: it is waited for there, and
another wait does as well, or what it protects from is no order of a device. `NOT_REACHED`: in no
scenario does anybody wait there for a device, the worker or the disk; by the file where that holds
for all of one.
"""

from __future__ import annotations

from typing import NamedTuple

from mutation.sites import Site

_ERRORS = "over already: it raises the errors of what is over"
_IN_ORDER = (
    "the worker and the copier do what they are given in order; it raises the errors of both"
)
_CPU = "only on CPUs: there others read a rank's memory"
_HOST = "waits for threads or processes of the host; tests of saves and of the launcher have it"
_CUT = "a save that ends early, or skips a block, leaves reads under way"

NOT_NOTICED: dict[str, str] = {
    "activations/kept.py _OnHost.given_up: self._leaving.wait()": (
        "the room's next copy down follows in the same stream; it raises the errors of a thread"
    ),
    "distributed/communicators.py connect: comm.send(number, receiver, group, number=0, "
    "name='connec...": "nobody changes what is sent, and torch holds it until it is",
    "stages/links.py StageLinks.flush: handle.wait()": (
        "torch holds what NCCL sends until it is sent; on CPUs others read it until then"
    ),
    "tiers/stored.py BlockReader.close: coming.wait_on_host()": _CUT,
    "tiers/stored.py BlockReader._take: coming.wait_on_host()": _CUT,
    "tiers/tiers.py Tiers._wait: wait()": _ERRORS,
    "tiers/tiers.py Tiers.wait_for_update: updated.wait()": _ERRORS,
    "zero/home_elsewhere.py OnHost.store.add: before.wait_on_host()": _IN_ORDER,
    "zero/home_elsewhere.py OnHost.settle: self._coming.wait_on_host()": (
        "norms are read behind the worker's last task, which the totals of a step follow"
    ),
    "zero/unit_grad.py UnitGrad.norms: self._away.settle()": (
        "of a gradient on a disk the worker takes them in passing; who does not wait reads it again"
    ),
    "zero/home_elsewhere.py OnDisk.fetch: self._merging.wait_on_host()": _IN_ORDER,
    "zero/home_elsewhere.py OnDisk.settle: self._merging.wait_on_host()": _IN_ORDER,
    "zero/updates.py Updates.make: self._reading_ahead.wait()": (
        "the worker begins these reads before the updates behind them; it is waited for so that "
        "the step that asked for them counts their bytes"
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
    "guards/watchdog.py": _HOST,
    "library/device_check.py": "of `zrun doctor --gpu`, which test_boards.py runs",
    "plan/trace/trace_process.py": _HOST,
    "tensor_parallel/column_grads.py _Begin.backward: wait()": (
        "in the scenarios no region of columns has two inputs with gradients"
    ),
    "tensor_parallel/tensor_comm.py TensorComm._rows: self._comm.settle()": _CPU,
    "tiers/slots.py Slots._wait: self._changed.wait(_LOOK_S)": "until a thread gives a piece back",
    "tiers/swap_file.py _BlockTransfer.wait: self._over.wait()": (
        "is what a transfer of the disk waits by: taken out for those who call it"
    ),
    "tiers/swap_file.py SwapFile.close: self._changed.wait_for(lambda: not self._num_open)": _HOST,
    "tiers/tiers.py _Ascent.wait_on_host: self.begin_copy().wait_on_host()": (
        "streams wait for what comes up from a disk, and the host does not; transfers have it"
    ),
    "train/trainer.py": _HOST,
    "zero/gather.py Gatherer._refresh_stale: unit.wait_for_unshard()": (
        "for compiled blocks, which the simulated device has not"
    ),
    "zero/gather.py Gatherer.refresh: unit.wait_for_unshard()": (
        "for pipelines that update behind each micro-batch, with four ranks"
    ),
    "zero/gather.py Gatherer.end_pass: unit.wait_for_unshard()": "for modules that nobody uses",
    "zero/gather.py Gatherer.all_unsharded: self._comm.settle()": _CPU,
    "zero/gather.py Gatherer._reshard_all: unit.wait_for_unshard()": (
        "for parameters that are read between two backwards of a pass"
    ),
    "zero/home_elsewhere.py OnDisk.drop: self._coming.wait_on_host()": (
        "for updates that were read ahead for, and are not made"
    ),
    "zero/home_elsewhere.py OnHost.stored: self._coming.wait_on_host()": (
        "who looks between two steps has waited for what they store"
    ),
    "zero/home_elsewhere.py OnDisk.stored: self._merging.wait_on_host()": (
        "for gradients on a disk, which no save has"
    ),
    "zero/home_elsewhere.py OnDisk.store: self._merging.wait_on_host()": _CPU,
    "zero/home_elsewhere.py _All.wait: transfer.wait()": _CPU,
    "zero/sharded_model.py ShardedModel.gathered: self.updates.wait_for_readers()": _HOST,
    "zero/sharded_optimizer.py ShardedOptimizer.set_options: update.unit.update_side.wait()": (
        "for options that change between two steps of a delayed update"
    ),
    "zero/sharded_optimizer.py ShardedOptimizer._step_layer_wise: update.unit.settle()": (
        "for LAMB and LARS on the host, after a delayed step"
    ),
    "zero/unit.py FlatUnit.reshard: self._handle.wait()": (
        "for units that were prefetched, and not used after all"
    ),
    "zero/unit.py FlatUnit.reshard: self._comm.settle()": _CPU,
    "zero/updates.py Updates.settle: self._reading_ahead.wait()": (
        "for updates that were read ahead for, and are not made"
    ),
    "zero/updates.py Updates.make: self._comm.settle()": _CPU,
    "zero/updates.py Updates.make: self.wait_for_readers()": _HOST,
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
