"""Frames of agents from lines of JSON. With thousands of ranks, a launcher does little else."""

from __future__ import annotations

import json
from typing import Any

from pydantic_core import from_json

from zrun.transport.frames import EVENT, Frame


class FrameReader:
    """Cuts a stream of bytes into frames, one for each line that is a JSON object.

    The frame of an event has its text too, as `line`, where it can be recorded as it is: strict
    JSON in ASCII.
    """

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[Frame]:
        """Return the frames that `data` completes."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        frames = []
        for line in lines:
            frame = _event_of(line) or _frame_of(line)
            if frame is not None:
                frames.append(frame)
        return frames


def _event_of(line: bytes) -> Frame | None:
    if not (line.startswith(EVENT) and line.endswith(b"}") and line.isascii()):
        return None
    text = line[len(EVENT) : -1]
    try:
        event = from_json(text, allow_inf_nan=False)
    except ValueError:
        return None
    if not isinstance(event, dict):
        return None
    return {"frame": "event", "event": event, "line": text}


def _frame_of(line: bytes) -> Frame | None:
    try:
        frame = _parse(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(frame, dict):
        return None
    frame.pop("line", None)  # which is ours to add
    return frame


def _parse(line: bytes) -> Any:
    try:
        return from_json(line)
    except ValueError:
        # It takes no halves of surrogate pairs, which a log may have, and nothing after the end.
        return _decode(line.decode())[0]


_decode = json.JSONDecoder().raw_decode
