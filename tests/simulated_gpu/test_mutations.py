"""Each wait of the runtime is taken out once, and a scenario notices, or none waits there.

The table behind it is printed by `python tests/simulated_gpu/mutations.py`.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from mutation import page
from mutation.sites import Site, find
from mutation.unreached import REASONS
from scripts import run

SCRIPT = Path(__file__).with_name("mutations.py")
TIMEOUT_S = 3600
SITES = find()


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """The table, by name of the site."""
    file = tmp_path_factory.mktemp("mutations") / "rows.json"
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--json", str(file)],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert file.exists(), f"{done.stdout}\n{done.stderr}"
    found: dict[str, dict[str, Any]] = json.loads(file.read_text())
    return found


@pytest.mark.parametrize("site", SITES, ids=lambda site: site.name)
def test_nobody_can_do_without(rows: dict[str, dict[str, Any]], site: Site) -> None:
    row = rows[site.name]
    assert row["scenario"] or row["reason"], (
        f"{site.place}: {row['runs']} runs of scenarios have not noticed that this wait is gone. "
        "Take it out, or add a scenario that needs it; where none waits, say why in "
        "mutation/unreached.py"
    )


def test_reasons_are_of_waits_that_there_are() -> None:
    assert REASONS.keys() <= {site.name for site in SITES}


def test_what_is_told_to_the_allocator_is_taken_out_too() -> None:
    """`record_stream`, which no module calls now: here one that does is made up."""
    said = run(
        f"""
        import sys
        sys.path[:0] = {[str(SCRIPT.parent), str(SCRIPT.parents[2])]!r}
        import simulated_gpu, torch
        from mutation.disturbed import disturbed
        from mutation.sites import ROOT, Site, _of_file
        from zrun_core.hardware import accelerator

        source = "def use(memory, stream):\\n    memory.record_stream(stream)\\n"
        (site,) = _of_file("zero/made_up.py", source)
        made_up = dict()
        exec(compile(source, str(ROOT / site.file), "exec"), made_up)
        device = torch.device("cuda", 0)
        for taken_out in (None, site):
            simulated_gpu.clear_races()
            side = accelerator.new_stream(device)
            with disturbed(taken_out, 1) as reached:
                memory = torch.ones(1 << 12, device=device)
                accelerator.wait_stream(side, accelerator.current_stream(device))
                with accelerator.on_stream(side):
                    total = memory.sum()
                made_up["use"](memory, side)
                del memory
                print((site.file, 2) in reached.above, len(simulated_gpu.races()))
        """,
        races=1,
    )
    assert said.splitlines() == ["True 0", "True 1"]


def test_the_page_has_the_waits_that_there_are() -> None:
    told = page.named(page.PAGE.read_text(encoding="utf-8"))
    assert told == set(map(page.key, SITES)), f"write it again: python {SCRIPT.name} --write"
