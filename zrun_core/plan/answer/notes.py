"""What a reader of an estimate should know beside its numbers."""

from __future__ import annotations

from zrun_core.hardware.hardware import GB, Hardware
from zrun_core.memory.buffers import Tier
from zrun_core.plan.answer.outcome import FROM_DATA_SHEETS
from zrun_core.plan.question.candidate import Candidate
from zrun_core.plan.question.subject import Subject
from zrun_core.plan.timing.timing import MOST_COMPARED, doubt_of
from zrun_core.plan.trace.profile import Profile


def notes_of(
    candidate: Candidate, source: str, subject: Subject, hardware: Hardware
) -> tuple[str, ...]:
    """Return the notes of an estimate.

    Args:
        source: where its activations come from, as `Estimate.source`.
    """
    notes = []
    dims = candidate.dims
    traced = subject.traced(dims.tp, sequence=candidate.sequence_parallel)
    notes += _notes_of_trace(traced, candidate.checkpoint, source)
    if hardware.usual_disk and candidate.placement.uses(Tier.DISK):
        rate = f"{hardware.disk_read / GB:g} GB/s each way"
        notes.append(f"the disk was not measured: {rate} assumed")
    if doubt_of(candidate) > 1:
        notes.append(
            f"ZeRO-3 over {dims.shard_size:,} ranks: times are checked on up to {MOST_COMPARED}; "
            "published runs on 384 to 1,536 took 1.6 to 4.5 times what is predicted, so the range "
            "is wide, and a search prefers other configurations"
        )
    if not hardware.measured:
        notes.append(FROM_DATA_SHEETS)
    if candidate.partition and candidate.sequence_parallel:
        notes.append(
            "activations.partition changes nothing: with parallel.sequence the inputs of "
            "blocks are slices of the sequence already"
        )
    return tuple(notes)


def _notes_of_trace(profile: Profile, policy: str, source: str) -> list[str]:
    notes = []
    if source == "states alone":
        reason = profile.untraced.get(policy) or profile.why
        notes.append(f"activations with checkpoint {policy} are not known: {reason}")
    elif profile.why:
        notes.append(f"activations {source}: {profile.why}")
    return [*notes, *profile.notes]
