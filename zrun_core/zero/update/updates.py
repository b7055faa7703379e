"""The updates of a model's units at the end of each step, and those that run beside training.

make           at the end of a step: update every unit, or begin to
settle         before anybody looks at parameters or states between two steps
before_update  before anything changes states that a save still reads
read_ahead     beside the last backward of a step: what the first updates read
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from zrun_core.distributed.comm import Comm
from zrun_core.hardware import accelerator
from zrun_core.tiers.tiers import TierCounts, Tiers
from zrun_core.tiers.transfer import DONE, Transfer
from zrun_core.zero.reduce.reducer import Reducer
from zrun_core.zero.unit.flat_unit import FlatUnit
from zrun_core.zero.update.sharded_optimizer import Decision, ShardedOptimizer
from zrun_core.zero.wrap.sharding_config import ShardingConfig

# Is told what the gradient is divided by, 0-d, and by unit which parameters got one on any rank.
UpdateWatcher = Callable[[torch.Tensor, Sequence[bytes]], None]


class Updates:
    """The updates of a model.

    Attributes:
        optimizer: makes them; None until the model has one.
        num_made: made or skipped so far; `delay_after` counts them.
        step_counts: what the newest step has moved between tiers. The updates that a step begins
            run beside the next one, and are counted there.
        watcher: called with the gradients that an update is about to be made of; None: nobody is.
    """

    def __init__(
        self,
        units: Sequence[FlatUnit],
        settings: ShardingConfig,
        reducer: Reducer,
        comm: Comm,
        tiers: Tiers | None,
    ) -> None:
        """
        Args:
            units: of the model; frozen ones are left out.
            tiers: what it has beside its device; None if no state lives there.
        """
        self.optimizer: ShardedOptimizer | None = None
        self.num_made = 0
        self.step_counts = TierCounts(comm.device)
        self.watcher: UpdateWatcher | None = None
        self._units = [unit for unit in units if unit.trainable]
        self._settings = settings
        self._reducer = reducer
        self._comm = comm
        self._tiers = tiers
        self._wait_for_save: Callable[[], None] | None = None
        self._reading_ahead: Transfer = DONE

    def before_update(self, call: Callable[[], None]) -> None:
        """Call `call` once, before the next update, or what else changes states elsewhere.

        One save follows the other, so an earlier `call` has nothing to wait for any more.
        """
        self._wait_for_save = call

    def wait_for_readers(self) -> None:
        """Wait until no save reads what is about to change."""
        wait, self._wait_for_save = self._wait_for_save, None
        if wait is not None:
            wait()

    def read_ahead(self) -> None:
        """Begin to read what the first updates of this step need, beside the last backward."""
        if self._tiers is None or self.optimizer is None or self._wait_for_save is not None:
            return  # or a save reads the disk
        if self.watcher is not None:
            return  # it needs slots for the gradients
        if self._settings.schedule == "delayed":
            return  # a step settles the last updates first: it needs slots, and the same records
        if self.optimizer.starts_updates:
            order = self._reducer.order.forward
            self._reading_ahead = self.optimizer.read_ahead(order, self._tiers)

    def wait(self) -> None:
        """Wait for the updates that run beside training, and raise their errors."""
        for unit in self._units:
            unit.settle()

    def settle(self) -> None:
        """Let go of what was read ahead of the next updates, and wait for the last ones."""
        if self._reading_ahead is not DONE:
            self._reading_ahead.wait()
            self._reading_ahead = DONE
            assert self.optimizer is not None
            self.optimizer.forget_ahead()
        self.wait()

    def make(
        self,
        lr: float | None,
        divisor: torch.Tensor,
        skipped: torch.Tensor,
        has_grad: list[bytes],
    ) -> None:
        """Update all units, unless the step is skipped.

        Ranks have exchanged the step's sums since the last pass, which has waited for all that it
        gathered: none reads another one's parameters any more.

        Args:
            lr: learning rate of all groups; None leaves each its own.
            divisor: 0-d fp32, of the gradient.
            skipped: 0-d bool.
            has_grad: by unit, which parameters got a gradient on any rank.
        """
        optimizer = self.optimizer
        assert optimizer is not None
        self.wait_for_readers()
        self._reading_ahead.wait()  # until it has begun, and is counted
        self._reading_ahead = DONE
        if self.watcher is not None:
            self.watcher(divisor, has_grad)
        self.num_made += 1
        with torch.no_grad():
            if self.skips_on_device:
                # The host does not wait: the device divides, and skips by itself.
                grad_scale = divisor.masked_fill(skipped, 1.0)
                optimizer.step(lr, has_grad, grad_scale, skipped.float())
            else:  # one wait for both numbers
                decision = _decision_of(divisor, skipped)()
                if not decision.skipped:
                    is_one = decision.grad_scale is None
                    optimizer.step(lr, has_grad, None if is_one else divisor, None)
        if self._tiers is not None:
            self.step_counts = self._tiers.take_counts()
        if optimizer.starts_updates:
            self._start(optimizer, lr, _decision_of(divisor, skipped), has_grad)
        for unit in self._units:
            unit.mark_stale()

    @property
    def skips_on_device(self) -> bool:
        """True if the host does not know, after an update, whether it was made."""
        assert self.optimizer is not None
        return self._comm.device.type != "cpu" and self.optimizer.scales_inside

    def _start(
        self,
        optimizer: ShardedOptimizer,
        lr: float | None,
        decide: Callable[[], Decision],
        has_grad: list[bytes],
    ) -> None:
        """Begin the updates that run beside training."""
        assert self._tiers is not None
        delays = self._settings.schedule == "delayed"
        optimizer.start(
            lr,
            has_grad,
            decide,
            self._reducer.order.forward,
            self._tiers,
            delayed=delays and self.num_made > self._settings.delay_after,
        )
        if self._settings.schedule == "serial":
            self.settle()


def _decision_of(divisor: torch.Tensor, skipped: torch.Tensor) -> Callable[[], Decision]:
    """Return what waits until the host knows whether a step is made, and its divisor."""
    numbers = torch.stack([divisor, skipped.float()])
    arrived = None
    if accelerator.is_accelerator(numbers.device):
        on_device = numbers
        numbers = torch.empty_like(numbers, device="cpu", pin_memory=True)
        numbers.copy_(on_device, non_blocking=True)
        arrived = accelerator.Event(on_device.device)

    def decide() -> Decision:
        if arrived is not None:
            arrived.wait_on_host()
        is_one = float(numbers[0]) == 1.0
        return Decision(None if is_one else numbers[0], bool(numbers[1]))

    return decide
