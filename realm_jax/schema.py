"""How a configuration key is declared: once, with type, default, limits, help, and whether it may change on resume.

    @dataclass(frozen=True)
    class Checkpoint:
        every: int = key(1000, "steps between two saves", POSITIVE, operations=True)

A config is described by its sections, such as {"checkpoint": Checkpoint(every=100)}; the section "" has the keys at the
top. From them come the ConfigDict that users see and change, its validation, what may change on resume, and the page
that lists all keys. Not for which keys there are: `config.py`, which is the one thing to read next.
"""

import ast
import dataclasses
import difflib
import itertools
import math
import textwrap
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, NamedTuple, TypeVar

from ml_collections import ConfigDict

from realm_jax.errors import UserError

Sections = Mapping[str, Any]  # name → frozen dataclass whose fields are made by `key`
T = TypeVar("T")


class Limit(NamedTuple):
    """What a value must be, in words that follow "must be", and whether a value is."""

    words: str
    holds: Callable[[Any], bool]


class Key(NamedTuple):
    """A key as it is declared. operations: it may change on resume; inherit: it may be None, "as the model"."""

    default: Any
    help: str
    limit: Limit | None
    operations: bool
    inherit: bool


POSITIVE = Limit("positive", lambda value: value > 0)
NOT_NEGATIVE = Limit("at least 0", lambda value: value >= 0)
SHARE = Limit("between 0 and 1", lambda value: 0 <= value <= 1)
BELOW_ONE = Limit("at least 0 and below 1", lambda value: 0 <= value < 1)


def at_least(least: int, reason: str = "") -> Limit:
    """A limit from below. reason: in words that follow it."""
    return Limit(f"at least {least}{reason}", lambda value: value >= least)


def one_of(*values: str) -> Limit:
    """The limit of a key with a choice of values."""
    return Limit(f"one of {', '.join(map(repr, values))}", lambda value: value in values)


def key(default: T, help: str, limit: Limit | None = None, *, operations: bool = False, inherit: bool = False) -> T:
    """A field of a section; see `Key`. It takes values of the type of its default."""
    metadata = {"help": help, "limit": limit, "operations": operations, "inherit": inherit}
    return dataclasses.field(default=default, metadata=metadata)


def keys(sections: Sections) -> dict[str, Key]:
    """Dotted name → key, in the order of their declaration."""
    return {
        f"{name}.{field.name}".lstrip("."): Key(getattr(section, field.name), **field.metadata)
        for name, section in sections.items()
        for field in dataclasses.fields(section)
    }


def to_config_dict(sections: Sections) -> ConfigDict:
    """Every key with its default; a fresh, unlocked config."""
    values = {name: dataclasses.asdict(section) for name, section in sections.items()}
    return ConfigDict(values.pop("") | values)


def inherited(sections: Sections) -> dict[str, None]:
    """Dotted name → None of every key that may be None: "as the model of init_from"."""
    return {name: None for name, declared in keys(sections).items() if declared.inherit}


def science(config: ConfigDict, sections: Sections) -> dict[str, Any]:
    """Dotted key → value of what may not change on resume."""
    operations = {name for name, one in keys(sections).items() if one.operations}
    return {name: value for name, value in flatten(config.to_dict()).items() if name not in operations}


def check_values(config: ConfigDict, sections: Sections, skip: Collection[str] = (), kind: str = "config") -> None:
    """Raise UserError for a number that is not finite, and for a value beyond its limit unless its key is in `skip`.

    kind: what messages call the config.
    """
    values = flatten(config.to_dict())
    for name, value in values.items():
        require(not isinstance(value, float) or math.isfinite(value), name, "must be a finite number", kind)
    for name, one in keys(sections).items():
        if one.limit and name not in skip:
            require(one.limit.holds(values[name]), name, f"must be {one.limit.words}, not {values[name]!r}", kind)


def check_shape(config: ConfigDict, like: ConfigDict, kind: str = "config", nullable: Collection[str] = ()) -> None:
    """Raise UserError unless `config` has the keys of `like` and no others, with values of their types.

    kind: what messages call it. nullable: keys that may be None.
    """
    wanted, found = flatten(like.to_dict()), flatten(config.to_dict())
    begin = "realm_jax.config.default()" if kind == "config" else f"realm_jax.launch.{kind}.default()"
    for name, value in found.items():
        inside = next((known for known in wanted if known.startswith(f"{name}.")), None)
        require(inside is None, name, f"is a section; set its keys, such as {inside}", kind)
        require(name in wanted, name, f"no such key, {suggest(name, wanted)}", kind)
        require(
            value is None and name in nullable or _fits(value, wanted[name]),
            name,
            _type_advice(value, wanted[name]),
            kind,
        )
    for name in wanted:
        require(name in found, name, f"is missing; begin with `{begin}` and change what differs", kind)


def parse(text: str, kind: type) -> Any:
    """A value of the type of a key, as a command line has it: `1e-3`, `true`, `('a', 'b')`, or `a` for a tuple of one.

    Raises ValueError for a text that is no such value, and TypeError for a type that no text is parsed to.
    """
    if kind is bool:
        if text.lower() not in (*_TRUE, *_FALSE):
            raise ValueError(text)
        return text.lower() in _TRUE
    if kind is tuple:
        return _parse_tuple(text)
    if kind not in (int, float, str):
        raise TypeError(kind)
    return kind(text)


_TRUE, _FALSE = ("true", "t", "1"), ("false", "f", "0")


def _parse_tuple(text: str) -> tuple[Any, ...]:
    try:
        value = ast.literal_eval(text)
    except (SyntaxError, ValueError):
        if "," in text or " " in text:  # a tuple without quotes about its elements
            raise ValueError(text) from None
        value = text
    return tuple(value) if isinstance(value, tuple | list) else (value,)


def _fits(value: Any, example: Any) -> bool:
    """Whether a value is of the type of `example`. A whole number is a float too, but a truth value is not a number."""
    kind = (int, float) if isinstance(example, float) else type(example)
    return example is None or isinstance(value, kind) and isinstance(value, bool) == isinstance(example, bool)


def _type_advice(value: Any, example: Any) -> str:
    given = "None" if value is None else type(value).__name__
    return f"takes a value of type {type(example).__name__}, such as {example!r}, not {given}"


def suggest(name: str, known: Iterable[str]) -> str:
    """Return the key that is most like an unknown one, as advice in a message; all sections if none is like it."""
    known = list(known)
    near = difflib.get_close_matches(name, known, 1)
    sections = ", ".join(sorted({one.partition(".")[0] for one in known}))
    return f"did you mean {near[0]}?" if near else f"at the top it has {sections}"


def help_text(sections: Sections) -> str:
    """Every key in Markdown: default, limit, what it means. Neighbouring sections of one type are listed together."""
    parts = []
    for kind, group in itertools.groupby(sections.items(), lambda item: type(item[1])):
        names, same = zip(*group, strict=True)
        heading = ", ".join(f"`{name}`" for name in names if name) or "At the top"
        section = names[0] if len(names) == 1 else "<section>"
        declared = [keys({section: one}) for one in same]
        entries = [_entry(name, [one[name] for one in declared]) for name in declared[0]]
        parts += [f"### {heading}\n\n{kind.__doc__}\n", *entries, ""]
    return "\n".join(parts)


def _entry(name: str, declared: list[Key]) -> str:
    """The lines of one key, which several sections may have with a default of their own."""
    first, defaults = declared[0], [f"`{one.default!r}`" for one in declared]
    notes = [", ".join(defaults if len(set(defaults)) > 1 else defaults[:1])]
    if first.limit:
        notes.append(first.limit.words)
    if first.inherit:
        notes.append("`None`, on the command line `model`: as the model of `init_from`")
    if first.operations:
        notes.append("operations")
    text = f"* `{name}` ({'; '.join(notes)}): {first.help}"
    return textwrap.fill(text, 120, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested dictionaries as one with dotted keys."""
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        flat |= flatten(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return flat


def require(condition: bool, name: str, advice: str, kind: str = "config") -> None:
    """Raise UserError, with the key's name and what to do, unless the condition holds. kind: before the name."""
    if not condition:
        raise UserError(f"{kind}.{name}: {advice}")
