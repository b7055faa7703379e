"""The cost of micro-batches on some hardware, in every way that a search considers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from zrun_core.hardware.hardware import Hardware
from zrun_core.pipeline.split import Split
from zrun_core.plan.question.candidate import Candidate, CandidateKey
from zrun_core.plan.question.pipeline_model import PipelineModel
from zrun_core.plan.question.subject import Subject
from zrun_core.plan.timing.link_cost import TransferCost
from zrun_core.plan.timing.micro_batch_cost import MicroBatchCost, SegmentCost, TimingSettings
from zrun_core.plan.timing.traced_cost import OpColumns, columns_of, cost_of_trace


class CostModel:
    """Computes the cost of each kind of micro-batch once.

    Attributes:
        subject: the model, and its parts.
        pipeline: cuts the model into stages.
    """

    def __init__(
        self,
        subject: Subject,
        hardware: Hardware,
        settings: TimingSettings,
    ) -> None:
        self.subject = subject
        self.hardware = hardware
        self.settings = settings
        self._columns: dict[tuple[int, bool], dict[str, OpColumns]] = {}
        self.pipeline = PipelineModel(subject.whole)
        self._known: dict[CandidateKey, MicroBatchCost] = {}

    def micro_batch(self, key: CandidateKey) -> MicroBatchCost:
        """Return the cost of a micro-batch on one rank.

        Raises:
            KeyError: it was not traced so.
            JobError: the model cannot be divided so.
        """
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = self._cost(key)
        return found

    def border_bytes(self, candidate: Candidate, split: Split) -> list[float]:
        """Return the bytes of a micro-batch that cross the border in front of each chunk."""
        return self._at_borders(candidate, split, self.pipeline.crossing_bytes)

    def returning_bytes(self, candidate: Candidate, split: Split) -> list[float]:
        """Return the bytes of gradients that come back over the border in front of each chunk."""
        return self._at_borders(candidate, split, self.pipeline.returning_bytes)

    def _at_borders(
        self, candidate: Candidate, split: Split, of_flow: Callable[[int, int], float]
    ) -> list[float]:
        return [0.0, *(of_flow(start, candidate.micro) for start in split.starts[1:])]

    def _cost(self, key: CandidateKey) -> MicroBatchCost:
        found = self._by_trace(key)
        if key.tp == 1 or not self.hardware.uneven:
            return found
        return found.map(lambda each: _waiting(each, self.hardware.uneven))

    def _by_trace(self, key: CandidateKey) -> MicroBatchCost:
        profile = self.subject.traced(key.tp, sequence=key.sequence_parallel)
        columns = self._columns.get((key.tp, key.sequence_parallel))
        if columns is None:
            columns = self._columns[key.tp, key.sequence_parallel] = {
                policy: columns_of(trace, profile.num_blocks)
                for policy, trace in profile.traces.items()
            }
        return cost_of_trace(profile, key, self.hardware, self.settings, columns)


def _waiting(segment: SegmentCost, uneven: float) -> SegmentCost:
    """Return a segment after whose messages ranks have waited for the slowest of them."""

    def longer(traffic: TransferCost, computing: float) -> TransferCost:
        return traffic._replace(seconds=traffic.seconds + uneven * computing)

    return replace(
        segment,
        tp_forward=longer(segment.tp_forward, segment.forward),
        tp_backward=longer(segment.tp_backward, segment.backward),
    )
