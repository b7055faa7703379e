"""What tests on GPUs share with those of ranks on CPUs: the pool, the jobs and their comparison."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "dist"))
