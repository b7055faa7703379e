"""Only `zero/` touches the memory of a unit: other code asks by verbs. Read from the source.

Where a unit's states lie is its own affair, so whoever held a tensor of it would one day hold one
whose values are elsewhere. Tests may look at the memory itself, to compare or to damage it.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
OWNER = "zrun_core/zero/"
# Attributes that only units have, and those that say something else on a parameter or a placement.
OF_UNITS_ONLY = {"master", "update_side"}
OF_OTHERS_TOO = {"grad", "param", "record"}
OUTSIDE = sorted(
    str(path.relative_to(ROOT))
    for package in ("zrun", "zrun_core")
    for path in (ROOT / package).rglob("*.py")
    if not str(path.relative_to(ROOT)).startswith(OWNER)
)


def touches(source: str) -> list[str]:
    """Return `line: expression` of each place that touches the memory of what may be a unit."""
    tree = ast.parse(source)
    units = set(_names_of_units(tree))
    found = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute):
            continue
        may_be_unit = _last_name(node.value) in units or "unit" in _last_name(node.value)
        if node.attr in OF_UNITS_ONLY or (node.attr in OF_OTHERS_TOO and may_be_unit):
            found.append(f"{node.lineno}: {ast.unparse(node)}")
    return found


def _last_name(node: ast.expr) -> str:
    """Name that an expression ends with: `unit` of `replica.unit`, `units` of `model.units[0]`."""
    while isinstance(node, ast.Subscript | ast.Call):
        node = node.value if isinstance(node, ast.Subscript) else node.func
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def _names_of_units(tree: ast.Module) -> Iterator[str]:
    """Names that are annotated as units, or bound to something that is made of `units`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.arg) and node.annotation is not None:
            if "FlatUnit" in ast.unparse(node.annotation):
                yield node.arg
        elif isinstance(node, ast.For | ast.comprehension) and _mentions_units(node.iter):
            yield from _bound(node.target)
        elif isinstance(node, ast.Assign) and _mentions_units(node.value):
            for target in node.targets:
                yield from _bound(target)
        elif isinstance(node, ast.NamedExpr) and _mentions_units(node.value):
            yield from _bound(node.target)


def _mentions_units(node: ast.expr) -> bool:
    return re.search(r"\b_?units\b", ast.unparse(node)) is not None


def _bound(target: ast.expr) -> Iterator[str]:
    yield from (node.id for node in ast.walk(target) if isinstance(node, ast.Name))


@pytest.mark.parametrize(
    "source",
    [
        "def f(unit): return unit.grad",
        "def f(each: FlatUnit): each.param.window.release()",
        "for each in sharded.units: each.param.full.zero_()",
        "flat = [each.grad for each in sharded.units if each.trainable]",
        "first = sharded.units[0]\nfirst.param.views.clear()",
        "if (first := next(iter(model.units))): first.record.home.at()",
        "replica.unit.param.full[:3]",
        "sharded.units[0].grad",
        "anything.at_all().master",
    ],
)
def test_the_scan_sees_a_touch(source: str) -> None:
    assert len(touches(source)) == 1


def test_the_scan_knows_what_is_no_unit() -> None:
    assert not touches(
        "torch.full((), 1.0); param.grad = None; placement.grad; region.full; unit.values().flat"
    )


def test_only_zero_touches_a_units_memory() -> None:
    for path in OUTSIDE:
        assert not touches((ROOT / path).read_text(encoding="utf-8")), path


def test_the_names_are_those_that_units_have() -> None:
    """What was renamed there must be renamed here."""
    tree = ast.parse((ROOT / "zrun_core/zero/unit/flat_unit.py").read_text(encoding="utf-8"))
    assigned = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and ast.unparse(node.value) == "self"
    }
    properties = {
        node.name
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and "property" in map(ast.unparse, node.decorator_list)
    }
    assert assigned | properties >= OF_UNITS_ONLY | OF_OTHERS_TOO
