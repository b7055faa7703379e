"""Each wait of the runtime is taken out once, and a scenario notices, or a reason is written down.

The table behind it is printed by `python tests/simulated_gpu/mutations.py`.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from mutation.needless import NOT_NOTICED, NOT_REACHED
from mutation.sites import Site, find

SCRIPT = Path(__file__).with_name("mutations.py")
TIMEOUT_S = 1800
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
    if row["reason"]:
        assert not row["scenario"], f"not needless: {row['scenario']} notices, by {row['how']}"
        return
    assert row["scenario"], (
        f"{site.place}: {row['runs']} runs of scenarios have not noticed that this wait is gone. "
        "Take it out, add a scenario that needs it, or write the reason in mutation/needless.py"
    )


def test_reasons_are_of_waits_that_there_are() -> None:
    names = {site.name for site in SITES}
    assert NOT_NOTICED.keys() <= names
    assert NOT_REACHED.keys() <= names | {site.file for site in SITES}
