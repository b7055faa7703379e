"""Which modules read which parameters of others. Pure."""

from __future__ import annotations

from dataclasses import dataclass
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
    """

    whole: frozenset[Read] = frozenset()
    shapes: frozenset[Read] = frozenset()
    readers: frozenset[str] = frozenset()

    @property
    def names(self) -> set[str]:
        """Names of the parameters."""
        return {read.name for read in self.whole | self.shapes}


NO_READS = Reads()
