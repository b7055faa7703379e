"""What pages share: colours that any eye tells apart, charts, bars, and the file itself."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

import pytest

from zrun.pages import chart, document
from zrun.pages.bars import Bar, Piece, bars
from zrun_core.errors import JobError

# What eyes of each kind see of linear red, green and blue: Machado, Oliveira and Fernandes 2009.
EYES = {
    "all cones": ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0)),
    "no red": (
        (0.152286, 1.052583, -0.204868),
        (0.114503, 0.786281, 0.099216),
        (-0.003882, -0.048116, 1.051998),
    ),
    "no green": (
        (0.367322, 0.860646, -0.227968),
        (0.280085, 0.672501, 0.047413),
        (-0.011820, 0.042940, 0.968881),
    ),
    "no blue": (
        (1.255528, -0.076749, -0.178779),
        (-0.078411, 0.930809, 0.147602),
        (0.004733, 0.691367, 0.303900),
    ),
}
GROUNDS = {document.LIGHT: ("#ffffff", "#f6f8fa"), document.DARK: ("#0d1117", "#161b22")}


def dot(one: Sequence[float], other: Sequence[float]) -> float:
    return sum(a * b for a, b in zip(one, other, strict=True))


def linear(color: str) -> list[float]:
    parts = [int(color[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    return [each / 12.92 if each <= 0.04045 else ((each + 0.055) / 1.055) ** 2.4 for each in parts]


def contrast(one: str, other: str) -> float:
    """As WCAG 2 has it."""
    weights = (0.2126, 0.7152, 0.0722)
    light = [dot(weights, linear(each)) for each in (one, other)]
    return (max(light) + 0.05) / (min(light) + 0.05)


def seen(color: str, eye: str) -> tuple[float, float, float]:
    """In CIELAB, in which distances are as far as they look."""
    rgb = [min(1.0, max(0.0, dot(row, linear(color)))) for row in EYES[eye]]
    matrix = ((0.4339, 0.3762, 0.1899), (0.2126, 0.7152, 0.0722), (0.0177, 0.1095, 0.8728))
    x, y, z = (
        each ** (1 / 3) if each > 0.008856 else 7.787 * each + 16 / 116
        for each in (dot(row, rgb) for row in matrix)
    )
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


@pytest.mark.parametrize("colors", [document.LIGHT, document.DARK], ids=["light", "dark"])
def test_any_eye_tells_the_colours_apart_and_from_their_ground(colors: Sequence[str]) -> None:
    for color, ground in itertools.product(colors, GROUNDS[tuple(colors)]):
        assert contrast(color, ground) >= 3.0, (color, ground)
    for eye, (one, other) in itertools.product(EYES, itertools.combinations(colors, 2)):
        assert math.dist(seen(one, eye), seen(other, eye)) > 15, (eye, one, other)
    text = document.whole("t", [])
    assert all(f": {color};" in text for color in colors)
    assert all(ground in text for ground in GROUNDS[tuple(colors)])


def shapes(html: str, tag: str) -> list[dict[str, str]]:
    (picture,) = re.findall(r"<svg.*?</svg>", html)
    return [each.attrib for each in ElementTree.fromstring(picture).iter(tag)]


def test_a_bar_is_as_long_as_its_parts_and_as_the_others_are() -> None:
    rows = [
        Bar("a", [Piece("x", 30.0, 0), Piece("y", 10.0, 1)], "40", level=80.0),
        Bar("b", [Piece("x", 0.0, 0), Piece("y", 20.0, 1)], "20"),
    ]
    text = bars(rows, "{:g}".format, "the plan")
    first, second = re.findall(r"<svg.*?</svg>", text)
    x, y = shapes(first, "rect")
    assert float(x["width"]) == pytest.approx(3 * float(y["width"]), abs=0.2)
    assert float(y["x"]) == pytest.approx(float(x["width"]), abs=0.2)
    (alone,) = shapes(second, "rect")
    assert float(alone["width"]) == pytest.approx(2 * float(y["width"]), abs=0.2)
    (level,) = shapes(first, "line")
    assert float(level["x1"]) == pytest.approx(4 * float(alone["width"]), abs=0.5)
    assert "<title>x: 30</title>" in first
    assert text.endswith("; the red line is the plan</p>")
    assert bars([], "{:g}".format) == ""


def test_amounts_lie_on_top_of_each_other() -> None:
    points = [(1, [1.0, 0.0, 3.0]), (5, [2.0, 0.0, 2.0])]
    layers = [("low", 0), ("none", 1), ("high", 2)]
    text = chart.stack("t", layers, points, chart.short, level=8.0)
    low, high = ([*map(_point, each["points"].split())] for each in shapes(text, "polygon"))
    assert low[2:] == high[1::-1], "the edge between them is one"
    base = low[0][1]
    one = base - low[3][1]  # of the first step
    assert base - low[2][1] == pytest.approx(2 * one, abs=0.2)
    assert [base - y for _, y in high[2:]] == pytest.approx([4 * one, 4 * one], abs=0.4)
    (level,) = (each for each in shapes(text, "line") if each["class"] == "level plan")
    assert base - float(level["y1"]) == pytest.approx(8 * one, abs=0.8)
    assert "none</span>" not in text
    assert chart.stack("t", layers, [], chart.short) == ""
    alone = shapes(chart.stack("t", layers, points[:1], chart.short), "polygon")
    assert len(alone) == 2, "one moment has an area too"


@pytest.mark.parametrize("last", [1, 3, 40, 1000, 100_000, 123_456_789])
def test_no_two_numbers_below_a_chart_overlap(last: int) -> None:
    line = chart.Line("", [(1, 1.0), (last, 2.0)])
    (picture,) = re.findall(r"<svg.*?</svg>", chart.chart("t", [line], chart.short))
    texts = ElementTree.fromstring(picture).findall("text[@text-anchor='middle']")
    ends = [(float(each.attrib["x"]), 4.1 * len(each.text or "")) for each in texts]
    assert ends
    assert all(x + half < 400 for x, half in ends)
    assert all(a + half < b - other for (a, half), (b, other) in itertools.pairwise(ends))


def _point(text: str) -> tuple[float, float]:
    x, y = text.split(",")
    return float(x), float(y)


def test_a_page_loads_nothing_and_escapes_its_title() -> None:
    text = document.whole("<b>", ["x"])
    assert "<title>&lt;b&gt;</title>" in text
    assert not re.search(r"<script|<link|<img|@import|url\(|https?://", text)


def test_a_file_that_cannot_be_is_refused_in_words(tmp_path: Path) -> None:
    document.save(tmp_path / "a.html", document.whole("x\ud800", []), "-o")
    assert "<title>x\\ud800</title>" in (tmp_path / "a.html").read_text()
    for target, why in (
        (tmp_path, f"-o {tmp_path} is a folder: name a file in it"),
        (tmp_path / "no" / "a", f"there is no folder {tmp_path / 'no'}: make it first"),
        (tmp_path / ("a" * 300), "File name too long"),
    ):
        with pytest.raises(JobError, match=re.escape(why)):
            document.save(target, "x", "-o")
