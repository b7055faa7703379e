"""Imports point down, heavy ones are late, and only one module talks to other ranks.

Read from the source, not run.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Mapping, Set
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from zrun_core.spine.sections.schedules import PLAIN, SCHEDULES

ROOT = Path(__file__).resolve().parents[3]
SPINE = {
    ".".join(path.relative_to(ROOT / "zrun_core").with_suffix("").parts)
    for path in (ROOT / "zrun_core" / "spine").rglob("[a-z]*.py")
}
SPINE |= {"errors", "sizes", "checkpoint.folder_lock", "checkpoint.names", "tiers.probe"}
COLLECTIVES = (
    r"all_gather\w*|all_reduce\w*|all_to_all\w*|barrier|batch_isend_irecv|broadcast|gather|irecv|isend|monitored_barrier|"
    r"recv|reduce|reduce_scatter\w*|scatter|send"
)


@cache
def _modules() -> dict[str, Path]:
    paths = [path for package in ("zrun", "zrun_core") for path in (ROOT / package).rglob("*.py")]
    names = (
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for path in paths
    )
    return dict(zip(names, paths, strict=True))


@cache
def _tree(name: str) -> ast.Module:
    return ast.parse(_modules()[name].read_text(encoding="utf-8"))


@cache
def _source(name: str) -> str:
    """Without comments."""
    return ast.unparse(_tree(name))


class _Imports(ast.NodeVisitor):
    """Collects the modules that are imported; without `late`, only those imported along with the
    module itself.
    """

    def __init__(self, late: bool) -> None:
        self.late = late
        self.found: set[str] = set()

    def visit_If(self, node: ast.If) -> None:
        if ast.unparse(node.test) != "TYPE_CHECKING":
            self.generic_visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        if self.late:
            self.generic_visit(node)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        if self.late:
            self.generic_visit(node)

    def visit_Import(self, node: ast.Import) -> None:
        self.found.update(alias.name for alias in node.names)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        assert node.module is not None, "relative imports hide the layer"
        names = {f"{node.module}.{alias.name}" for alias in node.names}
        modules = names & _modules().keys()  # `from package import module`
        self.found.update(modules if len(modules) == len(names) else modules | {node.module})


@cache
def _imported(name: str, *, late: bool) -> frozenset[str]:
    imports = _Imports(late)
    imports.visit(_tree(name))
    return frozenset(imports.found - {name})


def _packages(modules: Set[str]) -> set[str]:
    return {module.partition(".")[0] for module in modules}


ALL = sorted(_modules())
CORE = [name for name in ALL if name.startswith("zrun_core")]
LAUNCHER = [name for name in ALL if name not in CORE]


def test_the_walk_sees_imports() -> None:
    assert "zrun_core.errors" in _imported("zrun.cli", late=False)
    assert "torch" in _packages(_imported("zrun.agent.bench", late=True))
    assert "torch" not in _packages(_imported("zrun.agent.bench", late=False))


def test_runtime_knows_no_launcher() -> None:
    for name in CORE:
        assert not _packages(_imported(name, late=True)) & {
            "zrun",
            "typer",
            "rich",
            "yaml",
            "pynvml",
        }, name


def test_spine_stands_alone() -> None:
    for name in [f"zrun_core.{module}" for module in sorted(SPINE)]:
        allowed = sys.stdlib_module_names | {"pydantic", "pydantic_core", "zrun_core"}
        imported = _imported(name, late=True)
        assert _packages(imported) <= allowed, name
        assert {module for module in imported if module.startswith("zrun_core")} <= {
            f"zrun_core.{part}" for part in SPINE
        }, name


@pytest.mark.parametrize("name", ["actions", "ownership", "schedule", "split"])
def test_schedules_are_data(name: str) -> None:
    """The trainer executes them and the planner replays them: they know neither, nor torch."""
    imported = _imported(f"zrun_core.pipeline.{name}", late=True)
    assert _packages(imported) <= sys.stdlib_module_names | {"zrun_core"}
    own = {module for module in imported if module.startswith("zrun_core")}
    known = ("zrun_core.pipeline", "zrun_core.errors", "zrun_core.spine.sections.schedules")
    assert all(module.startswith(known) for module in own)


def test_launcher_imports_torch_late() -> None:
    for name in LAUNCHER:
        imported = _imported(name, late=False)
        assert "torch" not in _packages(imported), name
        core = {
            module.removeprefix("zrun_core.")
            for module in imported
            if module.startswith("zrun_core.")
        }
        assert core <= SPINE, name  # all the rest of the runtime needs torch


def test_an_agent_needs_the_standard_library_only() -> None:
    """It starts sooner on every host: pydantic takes longer to import than all the rest of it."""
    left, found = ["zrun.agent.main"], set()
    while left:
        name = left.pop()
        found.add(name)
        left += (_imported(name, late=False) & _modules().keys()) - found
    assert "zrun.agent.workers" in found
    others = _packages(frozenset().union(*(_imported(name, late=False) for name in found)))
    assert others <= sys.stdlib_module_names | {"zrun", "zrun_core"}


def test_topology_knows_no_launcher() -> None:
    """Machines and groups of their devices, and nothing of jobs and ranks."""
    for name in [name for name in ALL if name.startswith("zrun.topology")]:
        above = {module for module in _imported(name, late=True) if module.startswith("zrun")}
        assert {module for module in above if not module.startswith("zrun.topology")} <= {
            "zrun_core.errors",
            "zrun_core.spine.visible_devices",  # of machines too
        }, name


def test_one_module_knows_nvml() -> None:
    """Its calls fail in many ways, and that one is ready for each."""
    for name in [name for name in ALL if name.startswith("zrun.") and name != "zrun.topology.nvml"]:
        assert "pynvml" not in _packages(_imported(name, late=True)), name


@pytest.mark.parametrize("name", [name for name in ALL if name.startswith("zrun.commands.")])
def test_command_module_has_one_public_name(name: str) -> None:
    command = name.rpartition(".")[2]
    public = [
        node.name
        for node in _tree(name).body
        if isinstance(node, ast.FunctionDef)
        and not node.name.startswith("_")
        and not _is_subcommand(node, command)
    ]
    assigned = [
        target.id
        for node in _tree(name).body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name) and not target.id.startswith("_")
    ]
    assert public + assigned == [command]


def _is_subcommand(node: ast.FunctionDef, command: str) -> bool:
    return any(
        ast.unparse(decorator).startswith(f"{command}.command(")
        for decorator in node.decorator_list
    )


def _refuse_cycles(imports: Mapping[str, Set[str]]) -> None:
    done: set[str] = set()

    def visit(name: str, above: tuple[str, ...]) -> None:
        assert name not in above, " -> ".join((*above[above.index(name) :], name))
        if name not in done:
            for below in sorted(imports[name]):
                visit(below, (*above, name))
            done.add(name)

    for name in sorted(imports):
        visit(name, ())


def test_no_cycles() -> None:
    _refuse_cycles({name: _imported(name, late=False) & _modules().keys() for name in ALL})


def test_folders_have_no_cycles() -> None:
    """A folder of `zrun` needs those below it only: late imports and types count too."""
    imports: dict[str, set[str]] = {}
    for name in LAUNCHER:
        named = {node.module for node in ast.walk(_tree(name)) if isinstance(node, ast.ImportFrom)}
        imports.setdefault(_folder(name), set()).update(_folder(each) for each in named if each)
    assert {"commands", "launch", "agent", "transport", "hosts", "system"} <= imports.keys()
    assert "transport" in imports["launch"]
    _refuse_cycles({folder: below & imports.keys() - {folder} for folder, below in imports.items()})


def _folder(name: str) -> str:
    """Return the part of `zrun` in which a module is; empty: it is none of `zrun`."""
    package, _, rest = name.partition(".")
    return rest.partition(".")[0] if package == "zrun" else ""


@pytest.mark.parametrize("depth", [1, 2])
def test_rooms_of_the_runtime_have_no_cycles(depth: int) -> None:
    """Neither do whole rooms (`plan`) need each other, nor the rooms inside (`plan.trace`)."""
    needs: dict[str, set[str]] = {}
    for name in CORE:
        below = {_room(other, depth) for other in _imported(name, late=True) if other in CORE}
        needs.setdefault(_room(name, depth), set()).update(below - {_room(name, depth)})
    assert needs["zrun_core.train"] >= {"zrun_core.memory", "zrun_core.spine"}
    tuple(TopologicalSorter(needs).static_order())  # raises CycleError, which names the rooms


def _room(name: str, depth: int) -> str:
    """Return the folder of a module, or the module where it is at the front of the house."""
    folders = name.split(".")[1:-1]
    return ".".join(["zrun_core", *folders[:depth]]) if folders else name


def test_only_one_module_calls_collectives() -> None:
    for name in [name for name in ALL if name != "zrun_core.distributed.collectives"]:
        source = _source(name)
        assert not re.search(rf"\b(?:dist|distributed|c10d)\.(?:{COLLECTIVES})\(", source), name
        assert not re.search(
            rf"from torch\.distributed\S* import [^\n]*\b(?:{COLLECTIVES})\b", source
        ), name


def test_no_bytes_of_others_are_unpickled() -> None:
    """A peer, a file or a job must not be able to make a process construct objects."""
    for name in ALL:
        imported = _packages(_imported(name, late=True))
        assert not imported & {
            "pickle",
            "cPickle",
            "_pickle",
            "dill",
            "cloudpickle",
            "joblib",
            "shelve",
            "marshal",
        }, name
        source = _source(name)
        if name == "zrun_core.checkpoint.export":
            source = source.replace("torch.save(", "")  # for others to load; nothing here does
        calls = (
            r"\w*_object_list|\w*_object|torch\.load|torch\.save"
            r"|yaml\.(?:unsafe_load|full_load|load)|np\.load|numpy\.load"
        )
        if (
            name == "zrun_core.checkpoint.weight_files"
        ):  # a state_dict that the job names, as tensors and nothing else
            source, number = re.subn(
                r"torch\.load\(path, map_location='cpu', mmap=True, weights_only=True\)", "", source
            )
            assert number == 1, name
        assert not re.search(rf"\b(?:dist\.|distributed\.)?(?:{calls})\(", source), name


def test_no_schedule_is_compared_by_its_name() -> None:
    """What sets one apart is a fact of it: `spine/sections/schedules.py`."""
    names = set(SCHEDULES) - {PLAIN}
    found = []
    for module in _modules():
        for node in ast.walk(_tree(module)):
            if isinstance(node, ast.Compare):
                texts = {n.value for n in ast.walk(node) if isinstance(n, ast.Constant)}
                found += [(module, node.lineno)] if names & texts else []
    assert found == []


def _private_with_args(node: ast.AST, *, is_private: bool = False) -> list[str]:
    """Return the private functions whose docstrings list arguments.

    Private are those with one underscore before their name, those in functions, and the methods of
    private classes.
    """
    found = []
    for child in ast.iter_child_nodes(node):
        hides = is_private
        if isinstance(child, ast.ClassDef):
            hides = is_private or child.name.startswith("_")
        elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            if is_private or re.match(r"_(?!_)", child.name):
                text = ast.get_docstring(child) or ""
                found += [child.name] if re.search(r"^ *Args:", text, re.MULTILINE) else []
            hides = True
        found += _private_with_args(child, is_private=hides)
    return found


def test_private_functions_list_no_arguments() -> None:
    """What their signatures do not say is in their first sentences."""
    found = {name: _private_with_args(_tree(name)) for name in _modules()}
    assert {name: functions for name, functions in found.items() if functions} == {}


def test_the_walk_tells_private_functions() -> None:
    doc = '"""Do it.\n\n    Args:\n        size: in bytes.\n    """'
    text = f"""
class Shown:
    def __init__(self, size):
        {doc}
    async def _within(self, size):
        {doc}

class _Hidden:
    def __init__(self, size):
        {doc}

def shown(size):
    {doc}
    if size:
        def inner(size):
            {doc}

def _other(size):
    \"\"\"Args are listed elsewhere.\"\"\"
"""
    assert _private_with_args(ast.parse(text)) == ["_within", "__init__", "inner"]
