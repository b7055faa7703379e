"""The pages say what is true.

Their jobs load, their commands and links exist, their keys are keys.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from modules_page import PAGE as MODULES
from modules_page import page as modules_page
from texts import texts
from words_page import PAGE as WORDS
from words_page import page as words_page

from zrun.cli import COMMANDS
from zrun.job.load import load_job
from zrun.job.schema import find_key, keys

ROOT = Path(__file__).resolve().parents[3]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
SECTIONS = {key.name for key in keys() if key.section is not None and len(key.path) == 1}
OPTIONS = {"--help", "--version"}
ENDINGS = (
    ".py",
    ".md",
    ".yaml",
    ".json",
    ".safetensors",
    ".grad",
)  # of what is no key, although it has a dot

every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def blocks(page: Path, language: str) -> list[str]:
    """The fenced blocks of a page in one language; "" for those without."""
    found = FENCED.findall(page.read_text(encoding="utf-8"))
    return [text for named, text in found if named == language]


def spans(page: Path) -> list[str]:
    """The code spans of a page, outside of fenced blocks."""
    return re.findall(r"`([^`\n]+)`", FENCED.sub("", page.read_text(encoding="utf-8")))


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_there_are_pages() -> None:
    assert {"README.md", "first-job.md", "job-file.md", "zero.md", "architecture.md"} <= {
        page.name for page in PAGES
    }


@every_page
def test_jobs_load(page: Path, tmp_path: Path) -> None:
    for text in blocks(page, "yaml"):
        (tmp_path / "job.yaml").write_text(text, encoding="utf-8")
        load_job(tmp_path / "job.yaml", environ={"HOME": "/home/me"})


@every_page
def test_code_compiles(page: Path) -> None:
    for text in blocks(page, "python"):
        compile(text, page.name, "exec")


@every_page
def test_commands_exist(page: Path) -> None:
    commands = [line for block in blocks(page, "") for line in block.splitlines()] + spans(page)
    named = [
        match[1] for line in commands if (match := re.match(r"(?:\$ )?zrun (--?\w+|\w+)", line))
    ]
    assert set(named) <= {*COMMANDS, *OPTIONS}


@every_page
def test_overrides_in_commands_are_keys(page: Path) -> None:
    lines = [
        line.partition("#")[0]
        for block in blocks(page, "")
        for line in block.splitlines()
        if "zrun train" in line
    ]
    for path in re.findall(r"[ '\"]([a-z_]+(?:\.[a-z_]+)*)=", "\n".join(lines)):
        assert find_key(tuple(path.split("."))) is not None, path


@every_page
def test_keys_exist(page: Path) -> None:
    for span in spans(page):
        match = re.fullmatch(r"([a-z]+)((?:\.[a-z_]+)+)(?:[:=].*)?", span)
        if match and match[1] in SECTIONS and not span.endswith(ENDINGS):
            assert find_key(tuple((match[1] + match[2]).split("."))) is not None, span


@every_page
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)]+)\)", page.read_text(encoding="utf-8")):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        assert linked.exists(), target
        assert not anchor or anchor in anchors(linked), target


def test_every_module_has_its_line() -> None:
    is_current = MODULES.read_text(encoding="utf-8") == modules_page()
    assert is_current, "write it again: .venv/bin/python tests/unit/house/modules_page.py"


def test_words_of_other_tools_are_those_that_are_answered() -> None:
    is_current = WORDS.read_text(encoding="utf-8") == words_page()
    assert is_current, "write it again: .venv/bin/python tests/unit/house/words_page.py"


def test_named_modules_exist() -> None:
    """The map names every folder, and no module that is gone."""
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    spans = re.findall(r"`([^`\n]+)`", text)
    named = {Path(span).name for span in spans if span.endswith(".py")}
    there = [path for package in ("zrun", "zrun_core") for path in (ROOT / package).rglob("*.py")]
    tests = (ROOT / "tests").rglob("*.py")
    assert named <= {path.name for path in [*there, *tests]}
    folders = {path.parent.relative_to(ROOT).parts for path in there}
    named_folders = {Path(span).parts for span in spans if span.endswith("/")}
    missing = [
        "/".join(parts)
        for parts in folders
        if len(parts) > 1 and not {parts, parts[1:], parts[-2:], parts[-1:]} & named_folders
    ]
    assert not missing


def test_every_text_that_a_user_can_meet_is_listed() -> None:
    found = {(text.path, text.kind, text.words) for text in texts()}
    assert ("zrun/commands/train.py", "help", "The job file.") in found
    words = "must return an nn.Module, {ref.call} returned {_a_type(model)}"
    assert ("zrun_core/user_code/user.py", "error", f"model {words}") in found
    labels = {text.words for text in texts(short=True) if text.path == "zrun/watch/report.py"}
    assert {"speed", "fragmentation"} <= labels
