"""States, activations and saves beside the device, on devices that are late."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import ranks
from scripts import run

HERE = str(Path(__file__).resolve().parent)
TIERS = ("device", "host", "disk")
Case = tuple[int, str, str, str, str]


def on_device(call: str, **settings: Any) -> Any:
    """Return what a function of `tiers_cases.py` returns in a process with a simulated GPU.

    Args:
        call: of the function, in Python.
        settings: as of `scripts.run`.
    """
    script = f"""
        import json, sys
        sys.path.insert(0, {HERE!r})
        from tiers_cases import *
        print(json.dumps({call}))
        """
    return json.loads(run(script, **settings).splitlines()[-1])


# Copies


def test_pieces_lie_across_ranges_of_pinned_memory() -> None:
    assert on_device("pieces_of_pinned_memory(True)", delay_us=300) == "equal"
    refused = on_device("pieces_of_pinned_memory(False)", delay_us=300)
    assert "invalid argument" in refused, "the device refuses a copy of a whole piece"


def test_a_copy_up_waits_for_none_that_goes_down() -> None:
    is_up, is_down, *arrived = on_device("a_copy_up_beside_one_down()")
    assert is_up
    assert not is_down
    assert arrived == [True, True]


# States elsewhere change no bit


def placements() -> list[Case]:
    """Every stage, placement and schedule that a job may have, except all of it on the device."""
    found = []
    for stage in range(4):
        for param in TIERS if stage == 3 else ("device",):
            for grad in TIERS:
                for optimizer in TIERS:
                    if (param, grad, optimizer) == ("device",) * 3:
                        continue
                    if grad != "device" and optimizer == "device":
                        continue  # a job may not
                    found += [
                        (stage, param, grad, optimizer, schedule)
                        for schedule in ("overlap", "serial", "delayed")
                        if schedule != "delayed" or (param, optimizer) == ("device", "host")
                    ]
    return found


# Each of these has waits of its own.
COVERING: list[Case] = [
    (1, "device", "device", "host", "overlap"),
    (2, "device", "host", "host", "delayed"),
    (0, "device", "disk", "disk", "serial"),
    (3, "host", "host", "host", "overlap"),
    (3, "disk", "disk", "disk", "overlap"),
    (3, "disk", "device", "device", "overlap"),
]


@pytest.mark.parametrize("seed", [1, 2])
def test_states_elsewhere_change_no_bit(tmp_path: Path, seed: int) -> None:
    call = f"differing({COVERING}, {str(tmp_path)!r})"
    assert on_device(call, delay_us=400, delay_share=0.6, seed=seed) == []


@pytest.mark.parametrize(
    ("stage", "param"), [*((stage, "device") for stage in range(4)), (3, "host"), (3, "disk")]
)
def test_every_placement_changes_no_bit(tmp_path: Path, stage: int, param: str) -> None:
    cases = [case for case in placements() if case[:2] == (stage, param)]
    random.Random(stage).shuffle(cases)
    call = f"differing({cases}, {str(tmp_path)!r})"
    found = on_device(call, delay_us=400, delay_share=0.6, seed=10 + stage, timeout_s=400)
    assert found == []


def test_a_step_with_states_elsewhere_makes_the_host_wait_for_no_kernel(tmp_path: Path) -> None:
    cases = [*COVERING, (3, "host", "device", "device", "overlap")]
    assert on_device(f"refusals({cases}, {str(tmp_path)!r})", delay_us=50) == []


def test_a_step_moves_what_is_planned(tmp_path: Path) -> None:
    cases = [*COVERING, (3, "host", "device", "device", "overlap")]
    assert on_device(f"moved_otherwise({cases}, {str(tmp_path)!r})") == []


def on_ranks(call: str, size: int, **settings: Any) -> list[Any]:
    """Return what a function of `tiers_cases.py` returns on each of some ranks."""
    script = f"""
        sys.path.insert(0, {HERE!r})
        from tiers_cases import *
        say({call})
        """
    ended = ranks.run(script, size, **settings)
    assert [each.code for each in ended] == [0] * size, "\n".join(each.error for each in ended)
    return [each.said[-1] for each in ended]


def test_states_elsewhere_change_no_bit_on_two_ranks(tmp_path: Path) -> None:
    call = f"differing({COVERING}, {str(tmp_path)!r}, (rank, size, size))"
    assert on_ranks(call, 2, delay_us=200, seed=5) == [[], []]


def test_reductions_that_move_on_beside_backward_change_no_bit(tmp_path: Path) -> None:
    """Two copies of the states, on two ranks each: each reduction has two parts."""
    call = f"beside_backward({str(tmp_path)!r}, (rank, size, 2))"
    assert on_ranks(call, 4, delay_us=100, seed=6) == [[True] * 2] * 4


def test_inputs_of_many_sizes_wait_elsewhere(tmp_path: Path) -> None:
    here, *away = on_device(f"inputs_elsewhere({str(tmp_path)!r})", delay_us=300, seed=3)
    assert away == [here, here]


def test_values_are_written_after_the_device_has_read_them() -> None:
    is_the_same, is_the_same_afterwards = on_device("values_written_after_an_evaluation()")
    assert is_the_same
    assert not is_the_same_afterwards


def test_memory_goes_after_copies_that_nobody_waits_for() -> None:
    assert on_device("races_of_memory_that_goes()", delay_us=400, races=1) == [1, 0]


def test_a_model_may_go_before_its_last_update() -> None:
    assert on_device("races_of_a_model_that_goes_before_its_update()", delay_us=400, races=1) == 0


# Saves


def test_a_snapshot_holds_the_values_in_the_bytes_that_they_take() -> None:
    assert on_device("a_snapshot()", delay_us=300) == [True] * 4
