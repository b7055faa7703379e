"""The names of the folders of checkpoints.

    step-00000050                  a step that is complete
    step-00000050.tmp-5f0c...      one that is being written, or that a dead process has left
    step-00000050.aside-9a41...    a damaged one, which made room for another of its number
    before-gpt.aside-9a41...       the steps of a run that the run `gpt` has started over
    latest                         a file: the name of the newest step
    best                           a file: the name of the best step, its metric, mode and value

Other modules ask here what such a name means: a `step-*` is not always a step.
"""

from __future__ import annotations

import os
import re
import secrets
from pathlib import Path

from zrun_core.errors import CheckpointError

LATEST = "latest"
BEST = "best"
_STEP = re.compile(r"step-([0-9]{8,19})")
_ASIDE = re.compile(r"(?:step-[0-9]{8,19}|before-.+)\.aside-[0-9a-f]{8}")
_STALE = re.compile(r"(?:step-[0-9]{8,19}|latest|best|.+\.aside-[0-9a-f]{8})\.tmp-[0-9a-f]+")


def step_name(step: int) -> str:
    """Return the name of the folder of a complete step."""
    return f"step-{step:08d}"


def step_of(name: str) -> int | None:
    """Return the step that a folder of this name holds; None: it is no complete step."""
    match = _STEP.fullmatch(name)
    return int(match[1]) if match else None


def steps_in(folder: Path) -> list[int]:
    """Return the steps that a folder holds, oldest first, whether they are valid or not.

    A folder that is not there has none.

    Raises:
        CheckpointError: it cannot be read.
    """
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be read: {error.strerror}") from None
    return sorted({step for name in names if (step := step_of(name)) is not None})


def tmp_name(name: str) -> str:
    """Return a name for a folder that is not complete yet, or not any more."""
    return f"{name}.tmp-{secrets.token_hex(8)}"


def is_stale(name: str) -> bool:
    """Return whether it is such a name: of a save under way, or of one that never ended."""
    return _STALE.fullmatch(name) is not None


def aside_name(name: str) -> str:
    """Return a name for a step that is set aside."""
    return f"{name}.aside-{secrets.token_hex(4)}"


def before_name(run_id: str) -> str:
    """Return a name for the folder of the steps from before the run started over."""
    return aside_name(f"before-{run_id}")


def is_aside(name: str) -> bool:
    """Return whether it is such a name; a person's folder `before-something` is none."""
    return _ASIDE.fullmatch(name) is not None


def belongs_to_steps(name: str) -> bool:
    """Return whether it goes along when steps are set aside; what is being written does not."""
    return (
        step_of(name) is not None
        or name in (LATEST, BEST)
        or (name.startswith("step-") and is_aside(name))
    )
