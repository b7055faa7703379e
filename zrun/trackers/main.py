"""`python -m zrun.trackers.main`: the process that feeds the trackers of one launch.

It reads the run's record as it grows, so nothing waits for it, and what it does not get to is still
there. Its first line on stdin is a JSON object, the arguments of `Feed`; the next one ends it:
`finished` or `failed`, or the end of stdin where the launcher is gone. Lines on its stdout are for
the user; what packages print goes to `logs/trackers.log`.
"""

from __future__ import annotations

import json
import os
import select
import sys
from contextlib import suppress
from pathlib import Path

from zrun.system.tail_file import FileTail
from zrun.trackers.feed import Feed

_TURN_S = 1.0
_TURNS = 5  # after which all is flushed


def main() -> None:
    asked = json.loads(sys.stdin.readline())
    folder = Path(asked.pop("folder"))
    told = os.fdopen(os.dup(1), "w", encoding="utf-8")
    _print_to(folder / "logs" / "trackers.log")

    def tell(text: str) -> None:
        with suppress(OSError):
            print(text.replace("\n", " "), file=told, flush=True)

    feed = Feed(**asked, folder=folder, tell=tell)
    tail = FileTail(folder / "events.jsonl")
    number = 0
    while True:
        state = _asked_to_end(_TURN_S)
        for line in tail.lines():
            with suppress(ValueError, KeyError, TypeError):
                feed.event(json.loads(line))
        if state is not None:
            feed.end(state)
            return
        number += 1
        if number % _TURNS == 0:
            feed.flush()


def _print_to(path: Path) -> None:
    """Send what is printed to a file, or nowhere."""
    try:
        path.parent.mkdir(exist_ok=True)
        log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    except OSError:
        log = os.open(os.devnull, os.O_WRONLY)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)


def _asked_to_end(patience_s: float) -> str | None:
    """Return how the launch ended, once it has; wait a while for that."""
    if not select.select([sys.stdin], [], [], patience_s)[0]:
        return None
    return sys.stdin.readline().strip() or "failed"


if __name__ == "__main__":
    main()
