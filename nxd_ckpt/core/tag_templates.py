"""Names of tags with fields, such as ``"ep{epoch}-ba{batch:06d}"``: a save fills them, a reader searches. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from string import Formatter
from typing import Annotated, Any

from nxd_ckpt.core.arguments import Kind, plain_mapping
from nxd_ckpt.core.suggestions import listed
from nxd_ckpt.errors import InvalidArgument

TagValues = Annotated[Mapping[str, Any], Kind("a dict of values by name", plain_mapping)]
"""Values of a template's fields."""

_NUMBER = r"[-+]?[0-9]+(?:\.[0-9]+)?(?:e[-+]?[0-9]+)?"
"""Pattern of a field without a value: numbers only. With text "ep{epoch}" would fit "ep3-ba400", too."""


def filled_tag(template: object, values: Mapping[str, Any] | None, known: Mapping[str, Any]) -> object:
    """Fill a template; a name without fields needs no ``values``. Fields may also be named as those of ``known``.

    Raises:
        InvalidArgument: fields without a value, values without a field, attributes or items of values, or a format that
            does not fit.
    """
    if values is None:
        own = _names_in(template)
        forgotten = [field for field in own if field not in known]
        if forgotten:
            raise InvalidArgument(
                f"tag {template!r} has a field for {listed(forgotten, ())} and no value: each save would replace the "
                f"one before. Pass tag_values={{{forgotten[0]!r}: ...}}, or a name without braces"
            )
        if not own:
            return template
    fields = _checked_fields(template, {} if values is None else values)
    chosen = {**{name: known[name] for name in known if name in fields}, **(values or {})}
    missing = [field for field in fields if field not in chosen]
    if missing:
        _refuse(template, f"no value for {listed(missing, list(map(str, chosen)))}")
    return _formatted(str(template), chosen)


class _Field(str):
    """A field without a value, which is filled with itself."""

    def __format__(self, form: str) -> str:
        return "{" + self + "}"


def narrowed(template: object, values: Mapping[str, Any]) -> str:
    """Return the template with the fields that have a value filled. Raises InvalidArgument as `filled_tag` does."""
    unfilled = {field: _Field(field) for field in _checked_fields(template, values)}
    return _formatted(str(template), {**unfilled, **values})


def names_that_fit(template: str) -> re.Pattern[str] | None:
    """Return the pattern of the names that a template may have been filled to; None for a name without fields."""
    if not _names_in(template):
        return None
    fields = Formatter().parse(template)
    return re.compile("".join(re.escape(text) + ("" if field is None else _NUMBER) for text, field, _, _ in fields))


def _checked_fields(template: object, values: Any) -> list[str]:
    """Return the fields of a template. Raises InvalidArgument if it is none, or one of ``values`` has no field."""
    if not isinstance(template, str) or not isinstance(values, Mapping):
        raise InvalidArgument(
            f"tag_values={values!r} with tag={template!r}: expected a dict of values for a tag with fields such as "
            "'ep{epoch}-ba{batch}'"
        )
    try:
        fields = [field for _, field, form, _ in Formatter().parse(template) for field in _fields(field, form)]
    except ValueError as error:
        raise InvalidArgument(f"tag {template!r} is not a valid template: {error}; write '{{{{' for a brace") from error
    unused = [name for name in values if name not in fields]
    if unused:
        missing = [field for field in fields if field not in values]
        lacking = f"no value for {listed(missing, list(map(str, values)))}; " if missing else ""
        _refuse(template, f"{lacking}no field for {listed(map(str, unused), fields)}")
    return fields


def _refuse(template: object, problem: str) -> None:
    raise InvalidArgument(
        f"tag {template!r} and tag_values= do not fit: {problem}; use a field that is a plain name for each value"
    )


def _formatted(template: str, values: Mapping[str, Any]) -> str:
    try:
        return template.format_map(values)
    except Exception as error:  # a value's own formatting may raise anything, and it must reach all ranks
        raise InvalidArgument(f"tag {template!r} cannot be filled with {dict(values)}: {error}") from error


def _names_in(template: object) -> list[str]:
    """Return the fields of a template that are plain names; braces that are no such fields are plain characters."""
    try:
        fields = [field for _, field, _, _ in Formatter().parse(template)] if isinstance(template, str) else []
    except ValueError:
        return []
    return [field for field in fields if field is not None and field.isidentifier()]


def _fields(field: str | None, form: str | None) -> list[str]:
    """Return the names in one field of a template: its own, and those in its format."""
    if field is None:
        return []
    return [field, *(inner for _, inner, _, _ in Formatter().parse(form or "") if inner is not None)]
