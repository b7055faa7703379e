"""What a ZeRO stage means is asked of `ZeroPolicy`, never of its number. Read from the source.

So is where a parameter server is known: in one file.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3] / "zrun_core"
POLICY = "ZeroPolicy"
FOLDERS = [ROOT / name for name in ("distributed", "memory", "zero", "optim", "checkpoint")]
FILES = [ROOT / "guards" / "replicas.py"]
MECHANISM = sorted([*FILES, *(path for folder in FOLDERS for path in folder.glob("*.py"))])
KNOWS_SERVER = ROOT / "zero" / "server.py"


def asks_for_stage(source: str) -> list[str]:
    """Return `line: expression` of each place outside of the policy that decides by a stage."""
    tree = ast.parse(source)
    policy = {
        id(node)
        for each in ast.walk(tree)
        if isinstance(each, ast.ClassDef) and each.name == POLICY
        for node in ast.walk(each)
    }
    found = []
    for node in ast.walk(tree):
        if id(node) in policy:
            continue
        match node:
            case ast.Compare() | ast.BoolOp():
                asked: ast.AST = node
            case ast.If(test=test) | ast.IfExp(test=test) | ast.Match(subject=test):
                asked = test
            case _:
                continue
        stages = (each for each in ast.walk(asked) if _is_stage(each))
        found += [f"{node.lineno}: {ast.unparse(stage)}" for stage in stages]
    return found


def _is_stage(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and node.attr in {"stage", "sharded"}


def names_in(source: str) -> set[str]:
    """Return every name of a class, variable, attribute, argument or import."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name):
                found.add(name)
            case ast.ClassDef(name=name) | ast.alias(name=name) | ast.keyword(arg=str(name)):
                found.add(name)
    return found


def test_the_scan_sees_questions() -> None:
    assert asks_for_stage("if policy.zero.stage == 3:\n    pass")
    assert asks_for_stage("kept = x if Sharded.GRADIENT in policy.zero.sharded else y")
    assert asks_for_stage("frees = self.stage > 2 and size > 1")
    assert asks_for_stage("match zero.stage:\n    case 0:\n        pass")
    assert not asks_for_stage("class ZeroPolicy:\n    def f(self):\n        return self.stage >= 3")
    assert not asks_for_stage('layout = {"stage": settings.zero.stage}')


@pytest.mark.parametrize("path", MECHANISM, ids=lambda path: str(path.relative_to(ROOT)))
def test_stages_are_asked_of_the_policy_only(path: Path) -> None:
    assert not asks_for_stage(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("path", MECHANISM, ids=lambda path: str(path.relative_to(ROOT)))
def test_one_file_knows_of_a_parameter_server(path: Path) -> None:
    names = names_in(path.read_text(encoding="utf-8"))
    knows = any("server" in name.lower() for name in names)
    assert knows is (path == KNOWS_SERVER)
