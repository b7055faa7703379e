"""Find the stages of a pipeline that have each parameter.

A parameter is on the stages whose segments use it: most on one, a tied one on several. A GPT of 4
blocks on 2 stages, whose head is its embedding:

    embed.weight       segments 0, 4    stages 0, 1    tied
    blocks.2.w         segment 2        stage 1
    never_called.w     none             stage 1: the last one

Pure: the runtime makes units of a stage's parameters, the planner plans the same ones.
"""

from __future__ import annotations

from collections.abc import Mapping

from zrun_core.errors import JobError
from zrun_core.pipeline.split import Split


def owned(uses: Mapping[str, tuple[int, ...]], split: Split) -> dict[str, tuple[int, ...]]:
    """Return the stages that have each parameter, in order.

    All tied parameters are on the same stages, which add up their gradients: those that use any of
    them.

    Args:
        uses: by name of a parameter, the segments that use it; none: the last stage has it.
    """
    last = split.pp - 1
    found: dict[str, tuple[int, ...]] = {}
    for name, segments in uses.items():
        stages = {split.stage_of(split.chunk_of_segment(segment)) for segment in segments}
        found[name] = tuple(sorted(stages)) or (last,)
    together = tied_stages(found)
    return {name: together if len(stages) > 1 else stages for name, stages in found.items()}


def tied_stages(owners: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
    """Return the stages that share tied parameters, in order; none if no parameter is tied."""
    return tuple(
        sorted({stage for stages in owners.values() if len(stages) > 1 for stage in stages})
    )


def chunks_of(
    uses: Mapping[str, tuple[int, ...]],
    split: Split,
    owners: Mapping[str, tuple[int, ...]],
    stage: int,
) -> dict[str, int]:
    """Return the chunk of each parameter of a stage, counted among its own; none with one chunk.

    Args:
        uses: as of `owned`.
        owners: as `owned` returns them.

    Raises:
        JobError: several of its chunks use one.
    """
    if split.virtual == 1:
        return {}
    found = {}
    for name, stages in owners.items():
        if stage not in stages:
            continue
        chunks = {split.chunk_of_segment(segment) for segment in uses[name]}
        here = sorted(chunk for chunk in chunks if split.stage_of(chunk) == stage)
        if len(here) > 1:
            raise JobError(
                f"parallel.virtual: chunks {here[0]} and {here[1]} of stage {stage} both use "
                f"{name}: write virtual: 1, or another parallel.split"
            )
        chunk = here[0] if here else split.chunks(stage)[-1]
        found[name] = chunk // split.pp
    return found
