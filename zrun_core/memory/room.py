"""Room that the ranks of a host have for states beside their devices; more is refused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from zrun_core.errors import PreflightError
from zrun_core.memory.buffers import Buffer, Tier
from zrun_core.memory.layout import whole_pages
from zrun_core.sizes import format_size


@dataclass(frozen=True)
class Limit:
    """Bytes that all ranks of a host may take together, and what sets them."""

    num_bytes: int
    why: str


@dataclass(frozen=True)
class Room:
    """Room that the ranks of one host may take beside their devices.

    Attributes:
        ranks: of the host.
        host: of its memory; None: any.
        disk: of the disk under the folder of states; None: any.
    """

    ranks: int = 1
    host: Limit | None = None
    disk: Limit | None = None

    def check(self, buffers: Sequence[Buffer]) -> None:
        """Refuse states that have no room, before anything of them is allocated.

        Args:
            buffers: of one rank; the others of the host are taken to be like it.

        Raises:
            PreflightError: together they take more than there is.
        """
        for tier, limit, what in (
            (Tier.HOST, self.host, "the host's memory"),
            (Tier.DISK, self.disk, "the disk"),
        ):
            of_rank = sum(whole_pages(each.num_bytes) for each in buffers if each.tier is tier)
            needed = self.ranks * of_rank
            if limit is not None and needed > limit.num_bytes:
                ranks = "" if self.ranks == 1 else f" on the {self.ranks} ranks of this host"
                raise PreflightError(
                    f"the model's states{ranks} take {format_size(needed)} of {what}, more than "
                    f"{format_size(limit.num_bytes)} ({limit.why}): zrun estimate says what would "
                    "fit"
                )
