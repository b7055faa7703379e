"""A schedule of all stages as text."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from zrun_core.pipeline.grid import Grid, bubble
from zrun_core.spine.sections.schedules import SCHEDULES


def drawn(schedule: str, stages: int, virtual: int, micro_batches: int, width: int = 100) -> str:
    return Grid.of(schedule, stages, virtual, micro_batches).text(width)


def test_a_row_per_stage_shows_when_it_computes_what() -> None:
    assert drawn("1f1b", 3, 1, 4).splitlines() == [
        "stage 0  F0 F1 F2 .. .. .. .. B0 -- F3 B1 -- .. B2 -- .. B3 --",
        "stage 1  .. F0 F1 .. .. B0 -- F2 B1 -- F3 B2 -- .. B3 -- .. ..",
        "stage 2  .. .. F0 B0 -- F1 B1 -- F2 B2 -- F3 B3 -- .. .. .. ..",
        "",
        "F0: forward of micro-batch 0; B: backward; ..: idle",
        "",
        "stage  idle  forwards that wait",
        "    0   33%                   3",
        "    1   33%                   2",
        "    2   33%                   1",
    ]


def test_weights_have_cells_of_their_own() -> None:
    lines = drawn("zero_bubble", 3, 1, 5).splitlines()
    assert lines[2] == "stage 2  .. .. F0 B0 F1 B1 F2 B2 W0 F3 B3 W1 F4 B4 W2 W3 W4"
    assert lines[-1].split() == ["2", "12%", "1", "3", "3"]


def test_chunks_of_a_stage_have_letters() -> None:
    lines = drawn("interleaved", 2, 2, 4, width=200).splitlines()
    assert lines[0].split()[2:8] == ["F0a", "F1a", "F0b", "F1b", "F2a", "..."]
    assert "a, b: first, second chunk of the stage" in lines[3]
    sliced = drawn("layer_major", 1, 3, 2)
    assert sliced.startswith(
        "stage 0  F0a F1a F0b F1b F0c B0c --- F1c B1c --- B0b --- B1b --- B0a --- B1a ---\n"
    )
    assert "a, b: first, second slice of the model" in sliced


def test_pipedream_shows_the_versions_of_its_weights() -> None:
    rows = [line.split() for line in drawn("pipedream", 2, 1, 5, width=200).splitlines()]
    first = [word for word in rows[0] if word.startswith("F")]
    last = [word for word in rows[1] if word.startswith("F")]
    assert first == ["F0v0", "F1v0", "F2v1", "F3v2", "F4v3"]
    assert last == ["F0v0", "F1v1", "F2v2", "F3v3", "F4v4"]
    vertical = drawn("pipedream_vertical", 2, 1, 5, width=200).splitlines()
    assert [word for word in vertical[1].split() if word.startswith("F")] == first
    assert [line.split()[-1] for line in vertical[-2:]] == ["2", "2"], "versions on each stage"


@pytest.mark.parametrize("width", [60, 100, 237])
def test_what_does_not_fit_is_left_out_of_the_middle(width: int) -> None:
    lines = drawn("1f1b", 4, 1, 64, width).splitlines()
    assert max(len(line) for line in lines) <= width
    assert all(line.split().count("~") == 1 for line in lines[:4])
    assert lines[0].startswith("stage 0  F0  F1  F2  F3  ...")
    assert lines[0].endswith("B63 ---")
    left_out = int(" ".join(lines[5:]).split("~: ")[1].split()[0])
    kept = len(lines[0].split()) - 3  # of "stage 0" and the mark
    assert kept + left_out == (64 + 4 - 1) * 3


@pytest.mark.parametrize(
    ("schedule", "virtual"), [("1f1b", 1), ("gpipe", 1), ("zero_bubble", 1), ("interleaved", 3)]
)
@pytest.mark.parametrize("stages", [1, 2, 4, 7])
def test_the_arithmetic_of_a_bubble_is_what_the_grid_shows(
    schedule: str, virtual: int, stages: int
) -> None:
    if schedule == "interleaved" and stages == 1:
        return
    for micro_batches in (*range(1, stages + 1), 2 * stages, 5 * stages):
        grid = Grid.of(schedule, stages, virtual, micro_batches)
        found = [grid.idle(stage) for stage in range(stages)]
        wanted = bubble(schedule, stages, virtual, micro_batches)
        assert found == pytest.approx([wanted] * stages), micro_batches


def test_the_pictures_of_the_page_are_drawn_by_the_code() -> None:
    page = (Path(__file__).parents[3] / "docs/pipelines.md").read_text()
    heading = r"^schedule: (\w+), (\d) stages(?: of (\d) chunks)?, (?:the first )?(\d) .*\n"
    pictures = re.findall(heading + r"((?:stage \d.*\n)+)\n((?:[ \w]+%?.*\n)+)", page, re.MULTILINE)
    assert {name for name, *_ in pictures} == SCHEDULES.keys() - {"layer_major"}
    for name, stages, virtual, micro_batches, rows, table in pictures:
        text = drawn(name, int(stages), int(virtual or 1), int(micro_batches), width=118)
        there, _, below = text.split("\n\n")
        assert (rows, table) == (f"{there}\n", f"{below}\n")


def test_the_table_of_the_page_is_the_arithmetic() -> None:
    page = (Path(__file__).parents[3] / "docs/pipelines.md").read_text()
    lines = page.partition("| 4 stages, micro-batches per step |")[2].splitlines()
    micro_batches = [int(word) for word in lines[0].split("|") if word.strip()]
    for line, (name, virtual) in zip(
        lines[2:6],
        [("1f1b", 1), ("interleaved", 2), ("interleaved", 4), ("zero_bubble", 1)],
        strict=True,
    ):
        shown = [word.strip() for word in line.split("|")[2:-1]]
        assert shown == [f"{bubble(name, 4, virtual, count):.0%}" for count in micro_batches]
