"""`zrun doctor` on this machine, and what it stores."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from zrun.agent.bench import disk_rates
from zrun.agent.connectivity import Listener, link_rates
from zrun.preflight.calibration import Calibration
from zrun.preflight.host_bench import rounds
from zrun.preflight.host_report import rates_tables
from zrun_core.errors import JobError, ZrunError

RATES = Calibration.model_validate(
    {
        "made": "2026-01-01T00:00:00+00:00",
        "zrun": "0.1.0",
        "hosts": {
            "n1": {
                "cpu": {"fp32_flops": 8e10, "bf16_flops": 4e11},
                "copy_bytes_per_s": 1.2e10,
                "disk": {"folder": "/data", "error": "No such file or directory"},
                "gpus": [
                    {
                        "uuid": "GPU-a",
                        "name": "H100",
                        "fp32_flops": 5e13,
                        "bf16_flops": 7e14,
                        "fp16_flops": 7e14,
                        "copy_bytes_per_s": 1.4e12,
                        "to_device_bytes_per_s": 5.5e10,
                        "from_device_bytes_per_s": 5.4e10,
                    }
                ],
            }
        },
        "links": [{"source": "n1", "target": "n2", "bytes_per_s": 1.1e10, "round_trip_s": 3e-5}],
    }
)


def zrun(*argv: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "zrun", "doctor", *argv],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_this_machine_is_looked_at(tmp_path: Path) -> None:
    done = zrun("--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (host,) = json.loads(done.stdout)["hosts"]
    assert host["problems"] == []
    assert host["report"]["facts"]["hostname"] == os.uname().nodename
    assert host["report"]["folders"][0]["same"]
    assert list(tmp_path.iterdir()) == []


def test_rates_are_kept_for_the_planner(tmp_path: Path) -> None:
    path = tmp_path / "new" / "calibration.json"
    RATES.write(path)
    assert Calibration.read(path) == RATES
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert os.listdir(path.parent) == [path.name]
    assert Calibration.default_path({"HOME": "/home/me"}) == Path(
        "/home/me/.cache/zrun/calibration.json"
    )
    assert Calibration.default_path({"XDG_CACHE_HOME": "/c", "HOME": "/h"}) == Path(
        "/c/zrun/calibration.json"
    )


def test_what_is_no_calibration_is_refused(tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text('{"version": 2}')
    for name, said in {
        "other.json": "is no calibration of this zrun",
        "none.json": "No such file",
    }.items():
        with pytest.raises(JobError, match=f"{said}.*zrun doctor --bench"):
            Calibration.read(tmp_path / name)
    with pytest.raises(ZrunError, match="name another place with --save"):
        RATES.write(tmp_path / "other.json" / "x.json")


def test_rates_are_shown() -> None:
    lines = rates_tables(RATES)
    assert lines[1].split("  ")[0] == "n1"
    assert "/data: No such file or directory" in lines[1]
    assert any(
        "n1 0" in line and "700.00 TFLOP/s" in line and "55.00 GB/s" in line for line in lines
    )
    assert lines[-1].split() == ["n1", "n2", "11.00", "GB/s", "30", "us"]


def test_a_disk_is_measured_and_left_as_it_was(tmp_path: Path) -> None:
    rates = disk_rates(str(tmp_path), num_bytes=16 << 20)
    assert rates["write_bytes_per_s"] > 0
    assert rates["read_bytes_per_s"] > 0
    assert list(tmp_path.iterdir()) == []
    assert disk_rates(str(tmp_path / "none"))["error"] == "No such file or directory"


def test_a_link_is_measured() -> None:
    door = Listener("127.0.0.1", "mark")
    rates = link_rates("127.0.0.1", door.port, "mark", stream_s=0.05)
    assert rates["bytes_per_s"] > 1e6
    assert 0 < rates["round_trip_s"] < 1
    with pytest.raises(OSError, match="another machine or program"):
        link_rates("127.0.0.1", door.port, "kram")
    door.close()


@pytest.mark.parametrize("count", [2, 3, 4, 5, 8])
def test_every_link_of_the_ring_is_measured_once_and_alone(count: int) -> None:
    found = rounds(count)
    assert sorted(pair for pairs in found for pair in pairs) == [
        (each, (each + 1) % count) for each in range(count)
    ]
    for pairs in found:
        ends = [end for pair in pairs for end in pair]
        assert len(ends) == len(set(ends))
