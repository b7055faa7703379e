"""The layers around the forwards of a model's modules as lines: `zrun check JOB --layers`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from zrun_core.spine.printable import printable

_MOST_NAMES = 4


def layer_lines(kinds: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield lines on each kind of modules.

    Args:
        kinds: `LayeredKind`s, as data.
    """
    if not kinds:
        yield "layers: none: no module's forward is wrapped"
        return
    yield "layers: how ranks wrap the forwards of modules, outermost first"
    width = max(len(name) for kind in kinds for name, _ in kind["layers"])
    for kind in kinds:
        yield f"  {printable(_modules(kind))}"
        for name, about in kind["layers"]:
            yield f"    {name:<{width}}  {about}"
        yield f"    {printable(_innermost(kind))}"


def _modules(kind: dict[str, Any]) -> str:
    """Return which modules they are: their pattern and class, and how many if there are several."""
    names, class_name = kind["names"], kind["class_name"]
    title = f"{kind['modules'] or 'the model'}: {class_name}"
    if len(names) == kind["num_alike"]:
        return title if len(names) == 1 else f"{title}, all {len(names)}"
    some = ", ".join(names[:_MOST_NAMES])
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return f"{title}, {len(names)} of {kind['num_alike']}: {some}{more}"


def _innermost(kind: dict[str, Any]) -> str:
    own = f"{kind['class_name']}.forward"
    if kind["is_set"]:
        own = f"the forward that the model's code has put on this {kind['class_name']}"
    return own if kind["is_own_run"] else f"(in place of {own})"
