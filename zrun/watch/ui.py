"""The choice of a screen: a live panel where one can be drawn, plain lines elsewhere."""

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
    """Return what `auto` means here.

    Args:
        asked: returned as it is, unless it is `auto`.
        environ: CI and TERM count.
        width: of the terminal, in columns.
    """
    if asked is not Ui.auto:
        return asked
    if not is_tty or width < _NARROWEST:
        return Ui.plain
    if environ.get("TERM") == "dumb" or "CI" in environ:
        return Ui.plain
    return Ui.live
