"""What agents say, line by line: with thousands of ranks, most of what a launcher does is reading."""

from __future__ import annotations

import json
from typing import Any

from pydantic_core import from_json

from zrun.transport.frames import EVENT, Frame


class FrameReader:
    """Cuts a stream of bytes into frames of one line each; a line that is not a JSON object is skipped.

    The frame of an event has its text too, as `line`, where it can be recorded as it is: strict JSON in ASCII.
    """

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[Frame]:
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [
            frame for line in lines if (frame := _event_of(line) or _frame_of(line)) is not None
        ]


def _event_of(line: bytes) -> Frame | None:
    if not (line.startswith(EVENT) and line.endswith(b"}") and line.isascii()):
        return None
    text = line[len(EVENT) : -1]
    try:
        event = from_json(text, allow_inf_nan=False)
    except ValueError:
        return None
    return {"frame": "event", "event": event, "line": text} if isinstance(event, dict) else None


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
    except (
        ValueError
    ):  # it takes no halves of surrogate pairs, which a log may have, and nothing after the end
        return _decode(line.decode())[0]


_decode = json.JSONDecoder().raw_decode
