"""What stands for timelines that nobody has, so that states can be told all the same. Pure.

It is no more than a guess: see `Estimate.is_guess`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from zrun_core.plan.trace.profile import Affine, Event, Op, Profile, Trace, TracePhase

_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_OUTPUTS = 2  # that are kept of each matrix: its own, and what a function makes of it


def with_guesses(profile: Profile, policies: Sequence[str]) -> Profile:
    """`profile` with a timeline for each of these policies of checkpointing that was not traced.

    It is that of the model that recomputes nothing, if there is one; else each matrix is used once,
    by each token of a sample or by the sample.
    """
    missing = [policy for policy in policies if policy not in profile.traces]
    if not missing:
        return profile
    plain = profile.traces.get("none") or _from_shapes(profile)
    guesses = {policy: replace(plain, checkpoint=policy) for policy in missing}
    return replace(profile, traces={**profile.traces, **guesses}, guessed=frozenset(missing))


def _from_shapes(profile: Profile) -> Trace:
    positions = profile.tokens_per_sample or 1
    events: list[Event] = []
    ops: list[Op] = []
    matrices = [
        (number, param) for number, param in enumerate(profile.params) if len(param.shape) > 1
    ]

    def change(
        tensor: int,
        size: Affine,
        *,
        alloc: bool,
        phase: TracePhase,
        kind: Literal["activation", "grad"],
    ) -> None:
        param = profile.params[tensor % len(profile.params)]
        events.append(
            Event(tensor, size, alloc, phase, param.name.rpartition(".")[0], param.block, kind)
        )

    def computes(number: int, phase: TracePhase, times: int) -> None:
        param = profile.params[number]
        shape = (positions, param.shape[0], param.numel // max(1, param.shape[0]))
        moved = _BYTES.get(param.dtype, 4) * times
        work, traffic = (
            Affine(0.0, 2.0 * times * positions * param.numel),
            Affine(float(moved * param.numel), 0.0),
        )
        module = param.name.rpartition(".")[0]
        ops.append(Op("mm", "gemm", work, traffic, phase, module, param.block, param.dtype, shape))

    outputs = {
        number: Affine(
            0.0, float(_OUTPUTS * positions * param.shape[0] * _BYTES.get(param.dtype, 4))
        )
        for number, param in matrices
    }
    for number, size in outputs.items():
        change(number, size, alloc=True, phase=TracePhase.FORWARD, kind="activation")
        computes(number, TracePhase.FORWARD, 1)
    for number, param in reversed([*enumerate(profile.params)]):
        if number in outputs:
            computes(number, TracePhase.BACKWARD, 2)
        if param.trainable:
            size, tensor = (
                Affine(float(param.numel * _BYTES.get(param.dtype, 4)), 0.0),
                number + len(profile.params),
            )
            change(tensor, size, alloc=True, phase=TracePhase.BACKWARD, kind="grad")
            change(tensor, size, alloc=False, phase=TracePhase.BACKWARD, kind="grad")
        if number in outputs:
            change(
                number, outputs[number], alloc=False, phase=TracePhase.BACKWARD, kind="activation"
            )
    return Trace("none", tuple(events), tuple(ops))
