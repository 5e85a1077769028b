# SPDX-License-Identifier: Apache-2.0
"""The base of everything that is read from a record, and RecordError, what a malformed one raises."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from mla_portable.errors import MLAPortableError

Count = Annotated[int, Field(ge=0)]
Positive = Annotated[int, Field(ge=1)]
Text = Annotated[str, Field(min_length=1)]


class RecordError(MLAPortableError, ValueError):
    """A record is malformed, or says what cannot be. `where` names the file or the profile."""

    def __init__(self, where: str, problem: str) -> None:
        self.where, self.problem = where, problem
        super().__init__(f"{where}: {problem}")


class Model(BaseModel):
    """Exactly the fields that are named, of exactly their types."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


def validation_problems(error: ValidationError) -> list[str]:
    """One line for each, with the field that it is about."""
    return [f"{'/'.join(map(str, each['loc'])) or 'record'}: {each['msg']}" for each in error.errors()]
