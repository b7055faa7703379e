"""The public API is small, typed, documented, and cheap to import."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
import typing
from pathlib import Path
from typing import Any

import pytest
from test_docs import PAGES, blocks

import zrun_core

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs" / "library.md"
FUNCTIONS = [name for name in zrun_core.__all__ if inspect.isfunction(getattr(zrun_core, name))]
CLASSES = [name for name in zrun_core.__all__ if inspect.isclass(getattr(zrun_core, name))]


def test_no_module_takes_the_place_of_a_public_name() -> None:
    """Its import would set the package's attribute."""
    assert not {path.stem for path in (ROOT / "zrun_core").iterdir()} & set(zrun_core.__all__)


def reference() -> dict[str, str]:
    """Public name -> its line of the page's reference."""
    rows = re.findall(
        r"^\| `zrun_core\.(\w+)` \| (.+) \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE
    )
    assert len(dict(rows)) == len(rows)
    return dict(rows)


def public_methods(kind: type) -> dict[str, Any]:
    """What the class itself defines without an underscore."""
    return {
        name: member
        for name, member in vars(kind).items()
        if not name.startswith("_") and (inspect.isfunction(member) or isinstance(member, property))
    }


def as_written(function: Any, name: str) -> str:
    """`name(a, b=1)` as the page has it."""
    signature = inspect.signature(function)
    params = [
        param.replace(annotation=param.empty, kind=param.POSITIONAL_OR_KEYWORD)
        for param in signature.parameters.values()
        if param.name not in ("self", "set_to_none") and param.kind is not param.VAR_KEYWORD
    ]
    text = ", ".join(str(param).replace("'", '"') for param in params)
    more = (
        ", **options"
        if any(param.kind is param.VAR_KEYWORD for param in signature.parameters.values())
        else ""
    )
    return f"{name}({text}{more})"


def test_the_page_lists_every_public_name() -> None:
    assert sorted(reference()) == sorted(zrun_core.__all__)
    assert set(zrun_core.__all__) <= set(dir(zrun_core))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_signatures_are_as_written(name: str) -> None:
    written = as_written(getattr(zrun_core, name), name)
    assert written in reference()[name], written


@pytest.mark.parametrize("name", CLASSES)
def test_members_are_on_the_page(name: str) -> None:
    kind, row = getattr(zrun_core, name), reference()[name]
    for member, value in public_methods(kind).items():
        if name == "Optimizer" and member in ("state_dict", "load_state_dict"):
            continue  # refused
        assert f"`{member}`" in row or as_written(value, member) in row, member
    if name == "GradScaler":
        assert as_written(kind.__init__, name) in row


@pytest.mark.parametrize("name", zrun_core.__all__)
def test_public_names_are_typed_and_documented(name: str) -> None:
    found = getattr(zrun_core, name)
    assert found.__doc__
    members = [found] if inspect.isfunction(found) else list(public_methods(found).values())
    for member in members:
        function = member.fget if isinstance(member, property) else member
        assert function.__doc__, function
        hints = typing.get_type_hints(inspect.unwrap(function))
        params = [key for key in inspect.signature(function).parameters if key != "self"]
        assert set(params) | {"return"} == set(hints), function


def test_no_module_takes_the_name_of_what_is_public() -> None:
    """Once imported, a module of this name would be found in place of the function."""
    modules = {path.stem for path in (ROOT / "zrun_core").iterdir()}
    assert not modules & set(zrun_core.__all__)


def test_the_package_imports_nothing_until_it_is_asked() -> None:
    code = (
        "import sys, zrun_core; zrun_core.ZrunError; "
        "assert not {'torch', 'numpy', 'pydantic'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    with pytest.raises(AttributeError, match="it has GradScaler"):
        zrun_core.nothing  # noqa: B018


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_use_public_names_only(page: Path) -> None:
    for text in blocks(page, "python"):
        text = re.sub(
            r"from zrun_core\.models\.\w+ import", "", text
        )  # what is bundled is there to be named
        assert not re.search(r"(?:from|import) zrun_core\.|from zrun_core import", text)
        assert set(re.findall(r"\bzrun_core\.(\w+)", text)) <= set(zrun_core.__all__)


@pytest.mark.parametrize("package", ["zrun", "zrun_core"])
def test_packages_say_that_they_are_typed(package: str) -> None:
    assert (ROOT / package / "py.typed").exists()
    config = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert re.search(rf'^{package} = \[[^\]]*"py\.typed"', config, re.MULTILINE)
