"""The model as the planner cuts it into stages: its blocks, their costs, what crosses borders.

    model = PipelineModel(profile, None)
    split = model.split(ParallelDims(2, pp=4), ())      # as the runtime cuts it
    model.crossing_bytes(split.starts[1], micro=4)

They are those of the flow that the runtime follows, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from zrun_core.errors import ExitCode, JobError
from zrun_core.pipeline.ownership import owned, tied_stages
from zrun_core.pipeline.split import Split, at_names, balanced, equal
from zrun_core.plan.trace.profile import Profile
from zrun_core.spine.parallel_dims import ParallelDims

if TYPE_CHECKING:
    from zrun_core.stages.flow import Leaf


class FlowUnknownError(JobError):
    """Nobody can say what a pipeline of the model needs: what flows through it is not known."""

    exit_code = ExitCode.PREFLIGHT


class PipelineModel:
    """A model as a row of blocks.

    Attributes:
        blocks: their names, in the order in which they are called.
        costs: FLOPs of each segment's forward.
        why_not: why no pipeline can be made of it, or is known; None: one can.
    """

    def __init__(self, profile: Profile) -> None:
        self._flow = profile.flow
        self._flow_micro = profile.flow_micro
        self._numel = {param.name: param.numel for param in profile.params}
        self.blocks: Sequence[str] = ()
        self.costs: Sequence[float] = (0.0,)
        self.why_not: JobError | None = None
        if profile.flow is None:
            self.why_not = _why_not(profile)
        else:
            self.blocks = profile.flow.blocks
            self.costs = profile.flow.flops
        self._splits: dict[tuple[object, ...], Split] = {}
        self._tied: dict[Split, tuple[tuple[int, ...], int]] = {}

    @property
    def after_blocks(self) -> float:
        """As how many blocks what follows the last one computes."""
        blocks = sum(self.costs[:-1])
        return self.costs[-1] * len(self.blocks) / blocks if blocks else 0.0

    @property
    def uses(self) -> Mapping[str, tuple[int, ...]] | None:
        """The segments that use each parameter; None: it was not followed."""
        return None if self._flow is None else self._flow.uses

    def split(self, dims: ParallelDims, names: tuple[str, ...]) -> Split:
        """Return the chunks of the model, as the runtime cuts it.

        Args:
            names: of the first block of each chunk but the first; none: as the costs are most even.

        Raises:
            JobError: it cannot be cut so.
            FlowUnknownError: nobody can say how it would be cut.
        """
        if dims.pp == 1:
            return equal(len(self.blocks), 1)
        key = (dims.pp, dims.virtual, names)
        if key not in self._splits:
            if self.why_not:
                raise self.why_not
            if names:
                found = at_names(names, self.blocks, dims.pp, dims.virtual)
            else:
                found = balanced(self.costs, len(self.blocks), dims.pp, dims.virtual)
            for start in found.starts[1:]:
                self._crossing(start)
            self._splits[key] = found
        return self._splits[key]

    def crossing_bytes(self, block: int, micro: int) -> float:
        """Return the bytes that cross the border before a block."""
        crossing = sum(leaf.num_bytes for leaf in self._crossing(block))
        return crossing * micro / self._flow_micro

    def returning_bytes(self, block: int, micro: int) -> float:
        """Return the bytes of gradients that come back over the border."""
        returning = sum(leaf.num_bytes for leaf in self._crossing(block) if leaf.requires_grad)
        return returning * micro / self._flow_micro

    def tied(self, split: Split) -> tuple[tuple[int, ...], int]:
        """Return the stages that share tied parameters, and the elements of these."""
        if split.pp == 1 or self._flow is None:
            return (), 0
        found = self._tied.get(split)
        if found is None:
            owners = owned(self._flow.uses, split)
            elements = sum(self._numel[name] for name, stages in owners.items() if len(stages) > 1)
            found = self._tied[split] = tied_stages(owners), elements
        return found

    def _crossing(self, block: int) -> Sequence[Leaf]:
        if self._flow is None:
            return ()
        return self._flow.crossing(block)


def _why_not(profile: Profile) -> JobError:
    """Return why a traced model is not cut into stages."""
    if profile.why_no_flow:
        return JobError(profile.why_no_flow)
    why = profile.why or next(iter(profile.untraced.values()), "")
    if profile.is_partial:
        why = "out of time: --patience S gives it more"
    return FlowUnknownError(
        "parallel.pp: cannot estimate a pipeline of this model: what its blocks send each other is "
        f"not known{why and f' ({why})'}; parallel.pp=1 estimates the whole model"
    )
