"""What a rank measures of itself."""

from __future__ import annotations

import torch

from zrun_core.telemetry.metrics import process_memory


def test_no_process_holds_more_than_it_ever_did() -> None:
    grown = []
    for _ in range(50):
        grown.append(torch.ones(300_000))  # written to, so that it is resident
        held = process_memory(torch.device("cpu"))
        now, most = held["rss_bytes"], held["peak_rss_bytes"]
        assert now is not None
        assert most is not None
        assert now <= most
