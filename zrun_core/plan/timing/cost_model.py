"""The cost of micro-batches on some hardware, for every way to compute them that a search
considers.
"""

from __future__ import annotations

from zrun_core.hardware.hardware import Hardware
from zrun_core.pipeline.split import Split
from zrun_core.plan.question.candidate import Candidate, CandidateKey
from zrun_core.plan.question.pipeline_model import PipelineModel
from zrun_core.plan.question.transformer import TransformerShape
from zrun_core.plan.timing.formula_cost import cost_by_formula
from zrun_core.plan.timing.micro_batch_cost import MicroBatchCost, TimingSettings
from zrun_core.plan.timing.traced_cost import OpColumns, columns_of, cost_of_trace
from zrun_core.plan.trace.profile import Profile


class CostModel:
    """Computes the cost of each kind of micro-batch once.

    Attributes:
        subject: a traced model, or a shape.
        formula: the shape that stands for a traced model where tensor parallelism divides it; None:
            nothing divides it.
        pipeline: cuts the model into stages.
    """

    def __init__(
        self,
        subject: Profile | TransformerShape,
        hardware: Hardware,
        settings: TimingSettings,
        formula: TransformerShape | None = None,
    ) -> None:
        self.subject = subject
        self.hardware = hardware
        self.settings = settings
        self.formula = formula
        self._columns: dict[str, OpColumns] = {}
        if isinstance(subject, TransformerShape):
            self.formula = subject
        else:
            for policy, trace in subject.traces.items():
                self._columns[policy] = columns_of(trace, subject.num_blocks)
        self.pipeline = PipelineModel(subject, self.formula)
        self._known: dict[CandidateKey, MicroBatchCost] = {}

    def uses_formula(self, key: CandidateKey) -> bool:
        """Return True if the formulas of a shape answer for this kind of micro-batch."""
        if isinstance(self.subject, TransformerShape):
            return True
        if self.formula is None:
            return False
        return key.tp > 1 or key.checkpoint not in self.subject.traces

    def micro_batch(self, key: CandidateKey) -> MicroBatchCost:
        """Return the cost of a micro-batch on one rank.

        Raises:
            KeyError: neither a timeline nor a formula covers it.
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
        assert isinstance(self.subject, Profile)
        device = self.hardware.device
        return cost_of_trace(self.subject, key, device, self.settings, self._columns)
