"""Which modules read which parameters of others. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple


class Read(NamedTuple):
    """One module reads a parameter of another.

    Attributes:
        reader: its name; "": the model itself, or the loss function.
        name: the first one of the parameter.
    """

    reader: str
    name: str


@dataclass(frozen=True)
class Reads:
    """Those that are of the whole parameter, where ranks have slices.

    Attributes:
        whole: reads of values.
        shapes: reads of the shape alone.
        readers: modules that look up one of these parameters, for whatever they do with it.
        lines: by read, the first line that makes it, as file and line.
        looked_up: names of all parameters that are looked up outside of their modules; None: no
            forward has shown them to its end.
    """

    whole: frozenset[Read] = frozenset()
    shapes: frozenset[Read] = frozenset()
    readers: frozenset[str] = frozenset()
    lines: Mapping[Read, str] = field(default_factory=dict, hash=False)
    looked_up: frozenset[str] | None = None

    @property
    def names(self) -> set[str]:
        """Names of the parameters."""
        return {read.name for read in self.whole | self.shapes}


NO_READS = Reads()
