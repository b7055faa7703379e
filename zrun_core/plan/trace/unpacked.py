"""Sequences that nothing packs: what models of transformers find out from values, told to fake tensors.

A decoder without a cache looks at the positions of its tokens: several sequences packed into one row
need a mask. Positions without values cannot tell, and the model makes the mask for nothing. Those that
the model itself counts up are never packed; those that come with the batch may be.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

_MODULE, _FUNCTION = "transformers.masking_utils", "find_packed_sequence_indices"


@contextmanager
def as_unpacked(batch: Any) -> Iterator[None]:
    """Inside, positions are those of one sequence per row, unless `batch` brings its own."""
    module = sys.modules.get(_MODULE)
    found = getattr(module, _FUNCTION, None)
    if found is None or (isinstance(batch, Mapping) and "position_ids" in batch):
        yield
        return
    setattr(module, _FUNCTION, lambda *args, **kwargs: None)
    try:
        yield
    finally:
        setattr(module, _FUNCTION, found)
