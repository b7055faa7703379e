"""What is told of a model that cannot be traced: its parameters, and so a bound. Pure.

Its micro-batches have empty traces, by which they take nothing and no time: what a rank holds is at
least its states, and a step takes at least their update and messages. See
`Estimate.knows_states_only`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from zrun_core.plan.trace.profile import Profile, Trace
from zrun_core.plan.trace.rows import RowWriter, Vocabulary


def with_bounds(profile: Profile, policies: Sequence[str]) -> Profile:
    """Return `profile` with an empty trace for each checkpointing policy that was not traced."""
    missing = [policy for policy in policies if policy not in profile.traces]
    if not missing:
        return profile
    vocabulary = Vocabulary()
    rows = RowWriter(vocabulary).rows()
    empty = {policy: Trace.of_rows(policy, rows, vocabulary) for policy in missing}
    return replace(profile, traces={**profile.traces, **empty}, unknown=frozenset(missing))
