"""What a rank prints, from its log to `output` events: folded, cleaned, and never too much."""

from __future__ import annotations

from pathlib import Path

import pytest

from zrun.agent import echo as module
from zrun.agent.echo import Echo, LineBudget, Portion
from zrun.watch.plain import message_line
from zrun_core.spine.events import Event


class Printed:
    """A log that grows, and what is shown of it."""

    def __init__(self, folder: Path) -> None:
        self.path, self.note = folder / "rank-0.log", folder / "rank-0.json"
        self.path.write_text("of an earlier attempt\n")
        self.echo = Echo(self.path, 0, note=self.note)

    def add(self, text: str) -> None:
        with self.path.open("a", newline="") as file:
            file.write(text)

    def look(self, now: float) -> list[str]:
        return shown(self.echo.look(now))


def shown(events: list[Event]) -> list[str]:
    assert all((event["type"], event["rank"]) == ("output", 0) for event in events)
    return [
        line
        for event in events
        for line in [f"-{event['left_out']}"] * (event["left_out"] > 0) + event["lines"]
    ]


@pytest.fixture
def printed(tmp_path: Path) -> Printed:
    return Printed(tmp_path)


def test_new_lines_are_shown_once_and_clean(printed: Printed) -> None:
    assert printed.look(0) == []
    printed.add("one\n\x1b[31mtwo\x1b[0m\x1b[K\nhal")
    assert printed.look(1) == ["one", "two"]
    printed.add("f\x1b]0;title\x07\n")
    assert printed.look(2) == ["half^[]0;title^G"]
    assert printed.look(3) == []
    printed.add("x" * 5000 + "\n")
    assert printed.look(4) == ["x" * 1000 + " ..."]
    printed.path.write_text("emptied\n")
    printed.look(5)
    printed.add("goes on\n")
    assert printed.look(6) == ["goes on"]


def test_a_progress_bar_is_shown_in_its_last_state_now_and_then(printed: Printed) -> None:
    lines: list[str] = []
    for percent in range(101):  # one in each second
        printed.add(f"\r\x1b[32m{percent}%\x1b[0m")
        lines += printed.look(percent)
    assert lines[0] == "5%"
    assert 4 <= len(lines) <= 6
    printed.add("\n")
    assert printed.look(101) == ["100%"]
    assert printed.look(200) == []
    printed.add("no end")
    assert printed.look(201) == []
    assert printed.look(207) == ["no end"]
    assert printed.look(500) == []  # it has not changed


def test_of_a_burst_the_ends_are_shown_and_the_rest_is_counted(printed: Printed) -> None:
    printed.add("".join(f"{number}\n" for number in range(100_000)))
    assert printed.look(0.5) == [str(number) for number in range(module._BURST)]
    assert printed.look(1.0) == [f"-{100_000 - module._BURST - 3}", "99997", "99998", "99999"]
    printed.add("calm\n")
    assert printed.look(1.5) == ["calm"]


def test_a_screen_says_how_much_was_left_out_and_where_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    told: Event = {
        "type": "output",
        "rank": 3,
        "lines": ["[bold]a", "b"],
        "left_out": 0,
        "log": "n1:/runs/rank-3.log",
    }
    assert message_line(told) == "rank 3: [bold]a\nrank 3: b"
    first, *_ = (message_line(told | {"left_out": 12345}) or "").splitlines()
    assert first == "rank 3: ... 12,345 lines left out, see n1:/runs/rank-3.log"
    line = message_line(
        {**told, "lines": [], "left_out": 1, "log": str(tmp_path / "logs" / "rank-3.log")}
    )
    assert line == "rank 3: ... 1 line left out, see logs/rank-3.log"


def test_every_line_of_any_flood_is_shown_or_counted(printed: Printed) -> None:
    number = 0
    lines: list[str] = []
    for turn in range(200):
        count = (0, 3, 70, 20_000)[turn % 7 % 4]
        printed.add("".join(f"{number + extra} {'x' * (extra % 50)}\n" for extra in range(count)))
        number += count
        lines += printed.look(turn / 2)
    printed.add("end")
    lines += shown(printed.echo.last_look(100.0))
    left_out = sum(int(line[1:]) for line in lines if line.startswith("-"))
    assert left_out + sum(not line.startswith("-") for line in lines) == number + 1
    assert lines[-1] == "end"
    assert len(lines) < module._BURST + 2 * 100 * module._PER_S  # the ends of floods come on top


def test_a_rank_that_does_not_stop_is_mentioned_seldom() -> None:
    budget = LineBudget()
    told = [budget.admit(turn / 2, [b"line"] * 1000) for turn in range(121)]
    assert sum(len(portion.lines) for portions in told for portion in portions) < 200
    assert sum(portion.left_out > 0 for portions in told for portion in portions) == 6


def test_ranks_share_the_screen() -> None:
    (portion,) = LineBudget(share=10).admit(0.5, [b"line"] * 1000)
    assert portion == Portion(0, [b"line"] * 10)
    (portion,) = LineBudget(share=4096).admit(0.5, [b"line"] * 1000)
    assert portion == Portion(0, [b"line"])


def test_a_report_that_the_launcher_shows_is_not_shown_twice(printed: Printed) -> None:
    printed.add("before\n")
    size = printed.path.stat().st_size
    printed.note.write_text("{}")
    printed.add("Traceback:\nValueError\n")
    assert printed.look(1) == []  # it may be part of it already
    assert shown(printed.echo.last_look(2, size)) == ["before"]


def test_a_note_that_counts_wrong_hides_nothing_twice(printed: Printed) -> None:
    printed.add("one\ntwo\n")
    assert printed.look(1) == ["one", "two"]
    printed.add("three")
    assert shown(printed.echo.last_look(2, 10_000)) == ["three"]
    assert shown(printed.echo.last_look(3, 0)) == []


def test_a_log_that_never_came_to_be_is_empty(tmp_path: Path) -> None:
    echo = Echo(tmp_path / "none", 3)
    assert echo.look(1) == []
    assert echo.last_look(2) == []
