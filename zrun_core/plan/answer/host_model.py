"""What the ranks of a node take of its memory and its disks, beside what their devices hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from zrun_core.hardware.hardware import MIB, Hardware
from zrun_core.plan.answer.outcome import RankMemory, offloaded_bytes
from zrun_core.plan.question.candidate import Candidate
from zrun_core.spine.config import JobConfig
from zrun_core.spine.memory_limits import SHARED_BY_RANKS
from zrun_core.spine.parallel_dims import ParallelDims

# Of a rank in its host's memory; on a CPU that is the device's context.
_PROCESS_BYTES = {"cuda": 1800 * MIB, "cpu": 0}
_LOADER_BYTES = 220 * MIB  # of a process that reads data


class HostModel:
    """Adds up what the ranks of a node take there.

    Attributes:
        process_bytes: of a rank, whatever it trains.
    """

    def __init__(
        self, hardware: Hardware, job: JobConfig, num_params: int, device_type: str
    ) -> None:
        """
        Args:
            num_params: of the whole model.
            device_type: "cuda" or "cpu".
        """
        self._hardware = hardware
        self._job = job
        self._num_params = num_params
        self.process_bytes = _PROCESS_BYTES[device_type]

    def can_build(self, world: int) -> bool:
        """Return True if a node has room for the whole model, as its factory makes it."""
        processes = min(self._hardware.devices_per_node, world) * self.process_bytes
        return self._built_bytes + processes <= self._hardware.host_bytes

    @property
    def _built_bytes(self) -> int:
        """The bytes of the whole model in fp32."""
        return 4 * self._num_params

    def _local_ranks(self, dims: ParallelDims) -> int:
        return min(self._hardware.devices_per_node, dims.world_size)

    def parts(self, candidate: Candidate, ranks: Sequence[RankMemory]) -> dict[str, int]:
        """Return the bytes of a node's memory by what they are for.

        A node with several pipeline stages is taken to have the fullest ones.
        """
        local = self._local_ranks(candidate.dims)
        found = {
            "pinned": local * max(rank.pinned for rank in ranks),
            "pageable": local * (max(rank.pageable for rank in ranks) - self.process_bytes),
            "processes": local * self.process_bytes,
            "loaders": local * self._job.data.workers * _LOADER_BYTES,
            "build": 0 if candidate.init == "meta" else self._built_bytes,
        }
        if self._hardware.shares_memory:
            shared = (local - 1) * SHARED_BY_RANKS
            found["training"] = local * max(rank.device_used for rank in ranks) - shared
        return found

    def has_memory(self, parts: Mapping[str, int]) -> bool:
        """Return whether a node has the memory of these parts."""
        return most_at_once(parts) <= self._hardware.host_bytes

    def has_room(self, candidate: Candidate, ranks: Sequence[RankMemory]) -> bool:
        """Return whether a node has the memory and the disks that its ranks take."""
        parts = self.parts(candidate, ranks)
        if not self.has_memory(parts):
            return False
        most = self._hardware.offload_bytes
        if most is not None and offloaded_bytes(parts) > most:
            return False
        disk = self._local_ranks(candidate.dims) * max(rank.disk for rank in ranks)
        return disk <= self._hardware.disk_bytes


def most_at_once(parts: Mapping[str, int]) -> int:
    """Return the most that a node holds at once: while it trains, or while it builds the model."""
    training = sum(parts.values()) - parts["build"]
    return max(training, parts["build"] + parts["processes"])
