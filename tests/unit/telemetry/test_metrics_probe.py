"""What a rank measures of itself may fail; the rank may not."""

from __future__ import annotations

import os
import resource

import torch

from zrun_core.telemetry.metrics import process_memory


def test_a_process_that_may_open_no_more_files_measures_what_it_can():
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    opened = []
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, limits[1]))
        while True:
            try:
                opened.append(os.open(os.devnull, os.O_RDONLY))
            except OSError:
                break
        memory = process_memory(torch.device("cpu"))
    finally:
        for descriptor in opened:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert memory["rss_bytes"] is None
    assert memory["peak_rss_bytes"] > 0
    assert process_memory(torch.device("cpu"))["rss_bytes"] > 0
