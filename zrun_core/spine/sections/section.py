"""Parts of which the sections of a job file are made: bounded values, references, `Section`."""

from __future__ import annotations

import re
from typing import Annotated, Any, ClassVar, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from zrun_core.sizes import parse_size
from zrun_core.spine.sections.auto_values import AutoValue, LaunchFacts

MAX_RANKS = 2**17
NAME_PATTERN = r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}"
_REF = re.compile(r"(?P<where>[\w./~-]+\.py|[A-Za-z_][\w.]*):(?P<attr>[A-Za-z_][\w.]*)")


def _parse_bytes(value: Any) -> Any:
    return parse_size(value) if isinstance(value, str | int) else value


# Every number has an upper bound, so that a typing error ends in a message, not in all of the
# host's memory or in an overflow of whatever the number is handed to. Bounds of 10,000 and more are
# far beyond any use.
Bytes = Annotated[
    int, BeforeValidator(_parse_bytes), Field(ge=0, le=2**50, json_schema_extra={"unit": "bytes"})
]
Fraction = Annotated[float, Field(ge=0, lt=1)]
Positive = Annotated[float, Field(gt=0, le=1e30)]  # what fp32 holds
Seconds = Annotated[float, Field(gt=0, le=1e6)]  # 11 days: poll(2) counts milliseconds in 32 bits
Steps = Annotated[int, Field(gt=0, le=10**12)]
Samples = Annotated[int, Field(gt=0, le=10**9)]
Ranks = Annotated[int, Field(gt=0, le=MAX_RANKS)]


def check_pattern(pattern: str) -> str:
    """Return `pattern`, which must be a regular expression.

    Raises:
        ValueError: it is none.
    """
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{pattern!r} is not a regular expression: {error}") from None
    return pattern


Pattern = Annotated[
    str, AfterValidator(check_pattern), Field(json_schema_extra={"format": "regex"})
]


def _join_lines(schema: dict[str, Any]) -> None:
    """Make one line of a section's docstring, which editors show as a tooltip."""
    if "description" in schema:
        schema["description"] = " ".join(schema["description"].split())


class Section(BaseModel):
    """One mapping of a job file: immutable, and closed to keys that it does not define.

    A section may have a short form: with `short = ("stage", int)`, a bare `2` stands for
    `{stage: 2}`.
    """

    # Infinity and NaN are no hyper-parameters, but may be arguments of the user's code, so JSON
    # must carry them.
    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        validate_default=True,
        allow_inf_nan=False,
        ser_json_inf_nan="constants",
        defer_build=True,
        json_schema_extra=_join_lines,
    )
    short: ClassVar[tuple[str, type] | None] = None

    @classmethod
    def expand(cls, value: Any) -> Any:
        """Return the long form of `value`, or `value` itself where it is not the short form."""
        if cls.short is not None and type(value) is cls.short[1]:
            return {cls.short[0]: value}
        return value

    def resolve(self, known: LaunchFacts) -> tuple[Self, tuple[AutoValue, ...]]:
        """Return the section with values in place of what it leaves open, and why they are these.

        A section without such keys comes back as it is; one that is resolved already comes back
        equal, without reasons.
        """
        return self, ()

    @model_validator(mode="before")
    @classmethod
    def _expand(cls, value: Any) -> Any:
        return cls.expand(value)

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_bool_as_number(cls, value: Any, info: ValidationInfo) -> Any:
        field = cls.model_fields[info.field_name or ""]
        if isinstance(value, bool) and field.annotation is not bool:
            raise PydanticCustomError("bool_refused", "true and false are not numbers")
        return value


class Ref(Section):
    """The user's own code: `module:attr`, `file.py:attr` (relative to the job file), or
    `{call: ..., args: {...}}`.
    """

    short = ("call", str)

    call: str = Field(
        description='what to call, as "module:attr" or "file.py:attr"',
        examples=["train.py:build_model"],
        json_schema_extra={"format": "reference"},
    )
    args: dict[str, Any] = Field(
        default_factory=dict, description="keyword arguments of the call", examples=[{"dim": 512}]
    )

    @field_validator("call")
    @classmethod
    def _check_call(cls, call: str) -> str:
        if ".ipynb:" in call:
            raise ValueError(
                f"{call!r} is in a notebook: save its code as a file, such as train.py"
            )
        if not _REF.fullmatch(call):
            raise ValueError(f'{call!r} is not a reference: write "module:attr" or "file.py:attr"')
        return call

    @property
    def where(self) -> str:
        """Return the module or file part, before the colon."""
        return self.call.rpartition(":")[0]

    @property
    def attr(self) -> str:
        """Return the attribute part, after the colon; it may hold dots."""
        return self.call.rpartition(":")[2]
