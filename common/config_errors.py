"""What is wrong with a configuration, in the words of the person who wrote it."""

from __future__ import annotations

import difflib
from typing import get_args

from pydantic import BaseModel, ValidationError


def first_problem(error: ValidationError, document: type[BaseModel]) -> str:
    """One line with the field and the value; `document` is what was to be made."""
    first = error.errors()[0]
    field = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        return f"unknown field {field}: {_nearest(first['loc'], document)}"
    message = first["msg"].removeprefix("Value error, ")
    # What fails as a whole, or lacks a field, has the whole section as its value: nobody would find the mistake in it.
    got = "" if isinstance(first["input"], dict) else f" (got {first['input']!r:.80})"
    return f"{field}: {message}{got}" if field else f"{message}{got}"


def stored_problem(error: ValidationError, document: type[BaseModel]) -> str:
    """The same, of what another release has stored: a field that this one does not know is no slip of the pen."""
    first = error.errors()[0]
    if first["type"] == "extra_forbidden":
        field = ".".join(str(part) for part in first["loc"])
        return f"{field} = {first['input']!r:.80} is a field that it does not know"
    return first_problem(error, document)


def _nearest(location: tuple[int | str, ...], document: type[BaseModel]) -> str:
    """What a field that there is not was meant to be."""
    *sections, name = (str(part) for part in location)
    owner = document
    for section in sections:
        kind = _section(owner.model_fields[section].annotation)
        if kind is None:
            break
        owner = kind
    near = difflib.get_close_matches(name, owner.model_fields, n=1)
    if near:
        return f"did you mean {'.'.join([*sections, near[0]])}?"
    if elsewhere := [
        f"{section}.{name}"
        for section, field in document.model_fields.items()
        if (kind := _section(field.annotation)) is not None and name in kind.model_fields
    ]:
        return f"did you mean {elsewhere[0]}?"
    return f"known are {', '.join(owner.model_fields)}"


def _section(annotation: object) -> type[BaseModel] | None:
    """The section that a field is, or may be; None = it is a value."""
    kinds = (annotation, *get_args(annotation))
    return next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), None)
