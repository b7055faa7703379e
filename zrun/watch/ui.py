"""Which screen a run gets: a live panel where one can be drawn, plain lines elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

_NARROWEST = 40  # columns that the panel needs


class Ui(StrEnum):
    auto = "auto"
    live = "live"
    plain = "plain"
    json = "json"
    none = "none"


def choose(asked: Ui, is_tty: bool, environ: Mapping[str, str], width: int) -> Ui:
    """What `auto` means here."""
    if asked is not Ui.auto:
        return asked
    unfit = not is_tty or width < _NARROWEST or environ.get("TERM") == "dumb"
    return Ui.plain if unfit or "CI" in environ else Ui.live
