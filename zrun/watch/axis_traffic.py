"""What rank 0 has sent along each axis, and stages across their borders, beside theory. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from zrun.watch.rank_digest import stages_of
from zrun.watch.run_state import RunState

DATA = "data"
_APART = ("tensor", "pipe")  # of which the planner knows more than the ranks do
CROSSING = ("activations", "gradients")


class SentRow(NamedTuple):
    """Bytes of one kind along one axis.

    Attributes:
        what: the collective; along `pipe` what is handed on.
        theory, measured: None: not known.
    """

    axis: str
    what: str
    theory: int | None
    measured: int | None


class BorderRow(NamedTuple):
    """Bytes of a micro-batch that a rank of a stage hands to the next stage, or back.

    Attributes:
        to: the other stage.
        what: activations | gradients.
        borders: that they cross, more than one where stages have several chunks.
        theory, measured: of all these borders; None: not known.
    """

    stage: int
    to: int
    what: str
    borders: int
    theory: int | None
    measured: int | None


def sent_rows(state: RunState) -> list[SentRow]:
    """Return what rank 0 has sent in its launch; empty before its end.

    What follows from layouts the rank knows itself. What layers and stages exchange is in the
    estimate of the run, if there is one.
    """
    foretold = _foretold(state).get("sent") or {}
    steps = num_steps(state)
    rows = []
    for kind, each in ((state.end or {}).get("traffic") or {}).items():
        if kind not in _APART:
            rows.append(SentRow(DATA, kind, each.get("expected_bytes"), each.get("measured_bytes")))
            continue
        measured = each.get("by_kind")
        theory = {what: steps * size for what, size in (foretold.get(kind) or {}).items()}
        if measured is None:  # of an earlier version
            whole = sum(theory.values()) if theory else None
            rows.append(SentRow(kind, "all", whole, each.get("measured_bytes")))
            continue
        rows += rows_beside(kind, theory, measured)
    return rows


def theory_along(state: RunState, axis: str) -> int | None:
    """Return the bytes that rank 0 should have sent along an axis; None: the plan does not tell."""
    theory = [row.theory for row in sent_rows(state) if row.axis == axis]
    if not theory or None in theory:
        return None
    return sum(each for each in theory if each is not None)


def rows_beside(axis: str, theory: Mapping[str, int], measured: Mapping[str, int]) -> list[SentRow]:
    """Return a row for each kind that was foretold or measured."""
    default = 0 if theory else None  # a plan that tells of the axis tells all of it
    return [
        SentRow(axis, what, theory.get(what, default), measured.get(what, 0))
        for what in dict.fromkeys([*theory, *measured])
    ]


def num_steps(state: RunState) -> int:
    """Return how many steps the launch has made that is at its end."""
    return int((state.end or {}).get("step") or 0) - int((state.resumed or {}).get("step") or 0)


def border_rows(state: RunState) -> list[BorderRow]:
    """Return what each stage of a pipeline hands on for a micro-batch, by one of its ranks."""
    told = {each["stage"]: each["pipe_sent"] for each in stages_of(state) if each["pipe_sent"]}
    foretold = _foretold(state).get("stages_sent") or ()
    rows = []
    for stage, sent in sorted(told.items()):
        facts = state.stages.get(stage)
        if facts is None or not sent.get("micro_batches"):
            continue
        theory = foretold[stage] if stage < len(foretold) else {}
        measured = {what: round(sent.get(what, 0) / sent["micro_batches"]) for what in CROSSING}
        rows += borders_of(stage, facts["stages"], facts["virtual"], theory, measured)
    return rows


def borders_of(
    stage: int, stages: int, virtual: int, theory: Mapping[str, int], measured: Mapping[str, int]
) -> list[BorderRow]:
    """Return what a stage hands to the next one, and back to the one before.

    Args:
        theory, measured: bytes of a micro-batch by what is handed on; empty: not known.
    """
    is_last = stage == stages - 1
    ways = {
        "activations": ((stage + 1) % stages, virtual - 1 if is_last else virtual),
        "gradients": ((stage - 1) % stages, virtual - 1 if stage == 0 else virtual),
    }
    return [
        BorderRow(stage, to, what, borders, theory.get(what), measured.get(what))
        for what, (to, borders) in ways.items()
        if borders
    ]


def notes_on_theory(state: RunState) -> list[str]:
    """Return what a reader should know of the theory of these rows, where there is such a thing."""
    axes = {row.axis for row in sent_rows(state) if row.theory is None}
    if any(row.theory is None for row in border_rows(state)):
        axes.add("pipe")
    notes = []
    if axes:
        named = " and ".join(sorted(axes))
        note = f"The plan predicts nothing along {named}: those bytes are measured only"
        if state.estimate is None:
            note += ". The run had no estimate: zrun estimate makes one for its next launch"
        notes.append(f"{note}.")
    elif _foretold(state).get("is_bound") and _foretold(state).get("sent"):
        notes.append("Samples differ in size: along tensor and pipe theory is of the longest.")
    return notes


def _foretold(state: RunState) -> Mapping[str, Any]:
    return (state.estimate or {}).get("predicted") or {}
