"""The names of every setting: a table of the tree's leaves, and suggestions for mistyped names."""

from __future__ import annotations

import difflib
import types
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeVar, Union, get_args, get_origin

from pydantic import SecretStr, ValidationError

from emailrl.base.errors import UsageError
from emailrl.base.plain import cut
from emailrl.settings.fields import Address, Code, Env, Flag, Section, Written, is_url
from emailrl.settings.tree import PLAYED_WITH, PolicySettings, Settings

_Group = TypeVar("_Group", bound=PolicySettings)

PREFIX: Final = "EMAILRL_"  # of single-word environment names, since the bare word may belong to another program


@dataclass(frozen=True, eq=False)
class Leaf:
    """One setting: its place in the tree, its names, its type of value, and what it may decide (`fields`)."""

    section: str
    field: str
    env_names: tuple[str, ...]  # Environment names, the main one first.
    kinds: frozenset[Any]
    """Plain types of the value, with unions and constraints unwrapped; includes ``None`` if optional."""
    choices: tuple[str, ...]  # Values of a `Literal`, else empty.
    minimum: float | None
    maximum: float | None
    default: Any
    description: str
    flags: tuple[str, ...]  # Command-line spellings, for commands that offer the setting.
    address: Address | None
    code: Code | None
    written: Written | None

    def of(self, settings: PolicySettings) -> Any:
        """The setting's value."""
        return getattr(getattr(settings, self.section), self.field)

    @property
    def key(self) -> str:
        """Name unique across the tree, for flags and for the top level of ``emailrl.toml``."""
        return f"{self.section}_name" if self.field == "name" else self.field

    @property
    def names(self) -> tuple[str, ...]:
        """All lower-case names accepted in flags and ``emailrl.toml``, the unique one first."""
        bare = (name.lower() for name in self.env_names)
        section = (self.section,) if self.field == "name" else ()
        return tuple(dict.fromkeys((self.key, self.field, *bare, *section)))

    @property
    def summary(self) -> str:
        """The first sentence of the description."""
        text = " ".join(self.description.split())
        first, more, _ = text.partition(". ")
        return f"{first}." if more else text

    @property
    def secret(self) -> bool:
        return SecretStr in self.kinds

    @property
    def is_path(self) -> bool:
        return Path in self.kinds

    def names_server(self, value: object) -> bool:
        return self.address is not None and (is_url(str(value)) or not (self.address.or_else or self.code))


@dataclass(frozen=True)
class Given:
    """One value from a source, with the name and origin the user gave it."""

    value: Any
    name: str
    origin: str
    file: Path | None = None  # The file in the working folder that sets it; None if the user or a preset does.


@cache
def leaves() -> tuple[Leaf, ...]:
    """Every setting, in the order of the tree."""
    found = []
    for section, info in Settings.model_fields.items():
        model = info.annotation
        assert isinstance(model, type) and issubclass(model, Section)
        for name, field in model.model_fields.items():
            marks: dict[type, Any] = {type(mark): mark for mark in field.metadata}
            env, flag, bounds = marks.get(Env), marks.get(Flag), field.metadata
            kinds = tuple(_kinds(field.annotation))
            leaf = Leaf(
                section=section,
                field=name,
                env_names=env.names if env else (name.upper() if "_" in name else PREFIX + name.upper(),),
                kinds=frozenset(str if isinstance(kind, str) else kind for kind in kinds),
                choices=tuple(kind for kind in kinds if isinstance(kind, str)),
                minimum=next((item.ge for item in bounds if hasattr(item, "ge")), None),
                maximum=next((item.le for item in bounds if hasattr(item, "le")), None),
                default=field.default,
                description=field.description or "",
                flags=flag.spellings if flag else (f"--{name.replace('_', '-')}",),
                address=marks.get(Address),
                code=marks.get(Code),
                written=marks.get(Written),
            )
            found.append(leaf)
    return tuple(found)


@cache
def by_name() -> dict[str, Leaf]:
    """Lower-case name → setting, aliases included."""
    return {name: leaf for leaf in leaves() for name in leaf.names}


@cache
def by_env_name() -> dict[str, Leaf]:
    """Environment name → setting, aliases included."""
    return {name: leaf for leaf in leaves() for name in leaf.env_names}


def changed(settings: _Group, **values: Any) -> _Group:
    """The settings with these values, by name, as if they had been given; they are not checked again."""
    sections = tree_of({by_name()[name]: value for name, value in values.items()}).items()
    copies = {section: getattr(settings, section).model_copy(update=given) for section, given in sections}
    return settings.model_copy(update=copies)


def as_recorded(
    settings: _Group, record: Mapping[str, Mapping[str, Any]], *, given_wins: bool = False
) -> tuple[_Group, list[str]]:
    """The settings with those of ``PLAYED_WITH`` as a checkpoint recorded them (its default where it knew none), or
    as given if ``given_wins``; and what was given otherwise. UsageError for a recorded value that is none."""
    own, others = dict[str, Any](), list[str]()
    for name in PLAYED_WITH:
        leaf = by_name()[name]
        section = getattr(settings, leaf.section)
        try:
            value = record.get(leaf.section, {}).get(leaf.field, leaf.default)
            value = getattr(type(section).model_validate({leaf.field: value}), leaf.field)
        except ValidationError:
            hint = "Choose another checkpoint."
            raise UsageError(f"The checkpoint's {leaf.env_names[0]} is not a value of this setting.", hint) from None
        given = leaf.field in section.model_fields_set
        if value != (now := getattr(section, leaf.field)):
            others += [f"{leaf.env_names[0]}={cut(str(value), 80)}, not {now or 'unset'}"] if given else []
            own |= {} if given and given_wins else {name: value}
    return (changed(settings, **own) if own else settings), others


def tree_of(values: Mapping[Leaf, Any]) -> dict[str, dict[str, Any]]:
    tree: dict[str, dict[str, Any]] = {}
    for leaf, value in values.items():
        tree.setdefault(leaf.section, {})[leaf.field] = value
    return tree


def first_problem(error: ValidationError) -> tuple[Leaf, str]:
    """The setting with the first problem of a tree, and what it should be."""
    problem = error.errors(include_url=False)[0]
    [leaf] = [leaf for leaf in leaves() if (leaf.section, leaf.field) == problem["loc"][:2]]
    return leaf, problem["msg"].removeprefix("Input should be ").removeprefix("Value error, ")


def nearest(name: str, valid: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The valid name most similar to ``name``, ignoring case, or None if none is similar enough."""
    # Ties go to the name that shares more letters: gpro is more likely grpo with two letters swapped than gspo.
    folded = {candidate.lower(): candidate for candidate in valid}
    written = name.lower().replace("-", "_")

    def likeness(candidate: str) -> tuple[float, int]:
        shared = (Counter(written) & Counter(candidate)).total()
        return difflib.SequenceMatcher(None, candidate, written).ratio(), shared

    close = difflib.get_close_matches(written, folded, n=3, cutoff=cutoff)
    return folded[max(close, key=likeness)] if close else None


def _kinds(annotation: Any) -> Iterator[Any]:
    """The plain types and literal values that an annotation allows."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        yield from arguments
    elif origin is Annotated:
        yield from _kinds(arguments[0])
    elif origin in (Union, types.UnionType):
        for part in arguments:
            yield from _kinds(part)
    else:
        yield None if annotation is type(None) else origin or annotation
