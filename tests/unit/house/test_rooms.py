"""Tests of ranks are in rooms, and import only what is there wherever pytest begins.

It puts the folder of each test that it collects on `sys.path`: what a test imports from another
room is found where tests of that room are collected too, and missing where it runs alone.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
DIST = ROOT / "tests" / "dist"
MODULES = sorted(DIST.rglob("*.py"))
OF_ALL = "house"  # the room of what is about all of the product
# A job's reference to a file of tests/dist, as `runs.py:Speaker`.
REFERENCE = re.compile(r"([\w/]+\.py):")


def imported(source: str) -> Iterator[str]:
    """Yield the first name of each module that is imported."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.partition(".")[0]


def out_of_reach(room: str, source: str, rooms: Mapping[str, str]) -> list[str]:
    """Return the modules that a module of this room imports from another one.

    Args:
        rooms: the room of each module by its name; "" of one beside the rooms.
    """
    return [name for name in imported(source) if rooms.get(name, "") not in ("", room)]


def room_of(path: Path) -> str:
    return "" if path.parent == DIST else path.parent.name


def test_rooms_are_those_of_the_product() -> None:
    packages = [ROOT / "zrun", ROOT / "zrun_core"]
    folders = {each.name for package in packages for each in package.iterdir() if each.is_dir()}
    assert {room_of(path) for path in MODULES} - {"", OF_ALL} <= folders
    assert all(path.parent in (DIST, DIST / room_of(path)) for path in MODULES)
    assert not list(DIST.glob("test_*.py")), "a test has a room"


def test_no_two_modules_have_one_name() -> None:
    """Those of a run of pytest are imported under it."""
    names = Counter(path.stem for path in [*MODULES, *(ROOT / "tests" / "gpu").glob("test_*.py")])
    assert [name for name, number in names.items() if number > 1] == []


def test_modules_import_those_of_their_room_and_beside_the_rooms() -> None:
    rooms = {path.stem: room_of(path) for path in MODULES}
    found = {
        path.name: out_of_reach(room_of(path), path.read_text(encoding="utf-8"), rooms)
        for path in MODULES
    }
    assert {name: names for name, names in found.items() if names} == {}


def test_an_import_from_another_room_is_found() -> None:
    rooms = {"runs": "", "test_zoo": "models", "test_saves": "checkpoint"}
    source = "import test_zoo\n\ndef f():\n    from test_saves import same\n    import runs\n"
    assert out_of_reach("zero", source, rooms) == ["test_zoo", "test_saves"]
    assert out_of_reach("models", source, rooms) == ["test_saves"]


def test_files_that_jobs_name_are_there() -> None:
    names = {path.name for path in MODULES}
    found = {
        match[1]
        for path in MODULES
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        if (match := REFERENCE.match(node.value)) and Path(match[1]).name in names
    }
    assert len(found) > 20
    assert {file for file in found if not (DIST / file).is_file()} == set()
