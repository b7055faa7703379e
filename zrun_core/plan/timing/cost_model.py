"""The cost of micro-batches on some hardware, in every way that a search considers."""

from __future__ import annotations

from zrun_core.hardware.hardware import Hardware
from zrun_core.pipeline.split import Split
from zrun_core.plan.question.candidate import Candidate, CandidateKey
from zrun_core.plan.question.pipeline_model import PipelineModel
from zrun_core.plan.question.subject import Subject
from zrun_core.plan.timing.formula_cost import cost_by_formula
from zrun_core.plan.timing.micro_batch_cost import MicroBatchCost, TimingSettings
from zrun_core.plan.timing.traced_cost import OpColumns, columns_of, cost_of_trace


class CostModel:
    """Computes the cost of each kind of micro-batch once.

    Attributes:
        subject: a traced model, or a shape; and its parts.
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
        self.formula = subject.formula
        self._columns: dict[tuple[int, bool], dict[str, OpColumns]] = {}
        self.pipeline = PipelineModel(subject.whole, self.formula)
        self._known: dict[CandidateKey, MicroBatchCost] = {}

    def uses_formula(self, key: CandidateKey) -> bool:
        """Return True if the formulas of a shape answer for this kind of micro-batch.

        Raises:
            JobError: the model cannot be divided so.
        """
        profile = self.subject.traced(key.tp, sequence=key.sequence_parallel)
        if profile is None:
            return True
        return self.formula is not None and key.checkpoint not in profile.traces

    def micro_batch(self, key: CandidateKey) -> MicroBatchCost:
        """Return the cost of a micro-batch on one rank.

        Raises:
            KeyError: neither a timeline nor a formula covers it.
            JobError: the model cannot be divided so.
        """
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = self._cost(key)
        return found

    def border_bytes(self, candidate: Candidate, split: Split) -> list[float]:
        """Return the bytes of a micro-batch that cross the border in front of each chunk.

        Args:
            candidate: how the model is computed.
            split: of the model.
        """
        found = [0.0]
        for start in split.starts[1:]:
            num_bytes = self.pipeline.crossing_bytes(start, candidate.micro)
            if num_bytes is None or self.uses_formula(candidate.key):
                num_bytes = self.micro_batch(candidate.key).boundary_bytes
            found.append(num_bytes)
        return found

    def _cost(self, key: CandidateKey) -> MicroBatchCost:
        if self.uses_formula(key):
            assert self.formula is not None
            return cost_by_formula(self.formula, key, self.hardware, self.settings)
        profile = self.subject.traced(key.tp, sequence=key.sequence_parallel)
        assert profile is not None
        columns = self._columns.get((key.tp, key.sequence_parallel))
        if columns is None:
            columns = self._columns[key.tp, key.sequence_parallel] = {
                policy: columns_of(trace, profile.num_blocks)
                for policy, trace in profile.traces.items()
            }
        return cost_of_trace(profile, key, self.hardware, self.settings, columns)
