"""What all tests share: how `make test` chooses few rows of large tables (`--covering`)."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from itertools import groupby

import pytest

# Estimates of tests are those of a usual core, on any machine.
os.environ["ZRUN_CALIBRATION"] = "off"

Row = frozenset[tuple[int, ...]]  # which value each list of a table has there


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--covering",
        action="store_true",
        help="run few rows of each table of tests, and nothing that is marked thorough",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what `make test-all` runs and `make test` does not."""
    if not config.getoption("--covering"):
        return
    kept: list[pytest.Item] = []
    for _, table in groupby(items, key=_name):
        kept += _covering(list(table))
    chosen = set(kept)
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = kept


def _name(item: pytest.Item) -> str:
    """Return the name of a test, without that of the row."""
    return item.nodeid.partition("[")[0]


def _covering(table: Sequence[pytest.Item]) -> Iterator[pytest.Item]:
    """Yield the rows of one test that a covering run has.

    Those that are marked `covering`, if any is. Otherwise, of what is not marked `thorough`, rows
    in which each value of each list is: of two lists of which a test takes every pair, as many as
    the longer one has. A test that is marked `at_most(n)` has n of those, which have as many values
    as n can have, later ones first: tables go from what is plain to what is hard.
    """
    marked = [item for item in table if item.get_closest_marker("covering")]
    if marked:
        yield from marked
        return
    rows = [item for item in table if not item.get_closest_marker("thorough")]
    if not rows:
        return
    limit = len(rows)
    if at_most := rows[0].get_closest_marker("at_most"):
        (limit,) = at_most.args
        rows.reverse()
    missing = set().union(*map(_row, rows))
    if not missing:  # no table
        yield from rows
        return
    chosen = set()
    while missing and len(chosen) < limit:
        best = max(rows, key=lambda item: len(missing & _row(item)))  # the first of the best ones
        missing -= _row(best)
        chosen.add(best)
    yield from (item for item in table if item in chosen)


def _row(item: pytest.Item) -> Row:
    """Return by which values of its lists (`parametrize`) a row is known, as their identities."""
    callspec = getattr(item, "callspec", None)
    if callspec is None:
        return frozenset()
    left = dict(callspec.params)
    values = []
    for number, mark in enumerate(item.iter_markers("parametrize")):
        names = mark.args[0]
        if isinstance(names, str):
            names = [name.strip() for name in names.split(",")]
        values.append((number, *(id(left.pop(name)) for name in names if name in left)))
    values += [(-1, id(value)) for value in left.values()]  # of fixtures
    return frozenset(values)
