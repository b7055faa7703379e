"""A request of `zrun profile`, and the file by which it reaches the launcher and then rank 0.

Signals carry no words: who asks writes the file first, and signals then. The command does so in the
run directory of the launcher, and the agent of rank 0 in that of its host.
"""

from __future__ import annotations

import json
import os
import secrets
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from zrun_core.spine.folders import make_private

FOLDER = "profile"  # of the run directory: traces, and the request
_FILE = "asked.json"


@dataclass(frozen=True)
class ProfileRequest:
    """A request for a profile of the next steps.

    Attributes:
        id: by which the answer is known.
        steps: how many.
        ranks: to be traced.
    """

    id: str
    steps: int
    ranks: tuple[int, ...]

    @classmethod
    def new(cls, steps: int, ranks: tuple[int, ...]) -> ProfileRequest:
        """Return a request that is like no other."""
        return cls(secrets.token_hex(8), steps, ranks)

    @classmethod
    def parse(cls, text: str | bytes) -> ProfileRequest:
        """Return the request that `to_text` has written.

        Raises:
            ValueError: it is none.
        """
        found: Any = json.loads(text)
        try:
            return cls(str(found["id"]), int(found["steps"]), tuple(map(int, found["ranks"])))
        except (KeyError, TypeError) as error:
            raise ValueError(f"no request for a profile: {error}") from None

    def to_text(self) -> str:
        """Return the request as JSON."""
        return json.dumps(asdict(self))

    def write(self, run_dir: Path) -> None:
        """Put the request where `read` finds it, all of it or nothing."""
        folder = run_dir / FOLDER
        make_private(folder)
        new = folder / f"{_FILE}.{self.id}"
        new.touch(mode=0o600)
        new.write_text(self.to_text(), encoding="utf-8")
        os.replace(new, folder / _FILE)


def read(run_dir: Path) -> ProfileRequest:
    """Return the newest request in a run directory.

    Raises:
        OSError: there is none.
        ValueError: it is damaged.
    """
    return ProfileRequest.parse((run_dir / FOLDER / _FILE).read_bytes())
