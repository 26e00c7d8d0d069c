"""Strict settings: dataclasses from TOML files and `a.b=c` overrides, and back to plain data.

A key nobody knows, or a value of the wrong type, raises and says where it stands, what was expected and the nearest
valid choice. Objects with names (solvers, adjoints, schedules, optimisers) are tables such as
`{name = "anderson", memory = 8}`, or the bare name.
"""

import dataclasses
import difflib
import json
import math
import tomllib
import types
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from equipoise._errors import unknown_name
from equipoise.adjoints import ADJOINTS, Adjoint
from equipoise.solvers import SOLVERS, Solver

T = TypeVar("T")
Keys = tuple[str, ...]

FAMILIES: dict[type, Mapping[str, type]] = {Solver: SOLVERS, Adjoint: ADJOINTS}
"""Classes chosen by name in a table: a base class and its registry."""

_SCALARS = {bool: "true or false", int: "an integer", float: "a number", str: "a string"}
_NONFINITE = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}


class ConfigError(ValueError):
    """Settings that cannot be used; the message says where they stand and what would be valid."""


def register_family(base: type, registry: Mapping[str, type]) -> None:
    """Let fields annotated with `base` be given as `{name = ..., ...}`, `name` looked up in `registry`."""
    FAMILIES[base] = registry


@dataclass(frozen=True)
class Source:
    """Where values come from, for messages.

    Attributes:
        name: The file.
        overrides: Keys set on top of it, each with its text.
    """

    name: str = "the configuration"
    overrides: tuple[tuple[Keys, str], ...] = ()

    def of(self, path: Keys) -> str:
        """What set the value at `path`: the last override of it or of something around it, else the file."""
        for keys, text in reversed(self.overrides):
            if path[: len(keys)] == keys:
                return f"--set {text}"
        return self.name

    def within(self, path: Keys) -> str:
        """What the section at `path` was read from: the file and the overrides that touch the section."""
        texts = [f"--set {text}" for keys, text in self.overrides if keys[: len(path)] == path]
        return " ".join([self.name, *texts])


@dataclass(frozen=True)
class Table:
    """Plain settings that remember where they come from, to be built into dataclasses.

    Attributes:
        values: Nested dictionaries, lists, numbers, strings.
        source: Where they come from.
        path: The section that `values` is, from the top of the source.
    """

    values: Mapping[str, Any]
    source: Source = Source()
    path: Keys = ()

    def section(self, name: str) -> "Table":
        """A section of this table; an absent one is empty."""
        path = (*self.path, name)
        values = self.values.get(name, {})
        if not isinstance(values, Mapping):
            raise ConfigError(f"{self.source.of(path)}: {_dotted(path)} must be a section, got {values!r}.")
        return Table(values, self.source, path)

    def build(self, cls: type[T]) -> T:
        """A dataclass from the whole table; every key must be one of its fields."""
        return _Builder(self.source).dataclass(self.values, cls, self.path, MISSING)


def read_toml(path: str | Path, overrides: Iterable[str] = ()) -> Table:
    """Read a TOML file and apply overrides of the form `a.b=c`.

    Args:
        path: The file.
        overrides: Later ones win; values are TOML, or bare strings.
    """
    path = Path(path)
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        siblings = [p.name for p in path.parent.glob("*.toml")] if path.parent.is_dir() else []
        near = difflib.get_close_matches(path.name, siblings, n=1)
        hint = f"; did you mean {path.parent / near[0]}?" if near else "."
        raise ConfigError(f"there is no file {path}{hint}") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path} cannot be read as TOML: {error}") from error
    return with_overrides(Table(values, Source(str(path))), overrides)


def load_config(cls: type[T], path: str | Path, overrides: Iterable[str] = ()) -> T:
    """Read a TOML file with overrides into a dataclass."""
    return read_toml(path, overrides).build(cls)


def with_overrides(table: Table, overrides: Iterable[str]) -> Table:
    """A table on which overrides such as `solver.memory=8` have been set, keys counted from the top of the table."""
    values, said = dict(table.values), list(table.source.overrides)
    for text in overrides:
        keys, value = parse_override(text)
        _assign(values, keys, value, text)
        said.append(((*table.path, *keys), text))
    return Table(values, dataclasses.replace(table.source, overrides=tuple(said)), table.path)


def parse_override(text: str) -> tuple[Keys, Any]:
    """The keys and the value of `a.b=c`; what is not a TOML value is taken as a string."""
    name, equals, value = text.partition("=")
    keys = tuple(part.strip() for part in name.split("."))
    if not equals or not all(keys):
        raise ConfigError(f"override {text!r} is not of the form section.key=value.")
    try:
        parsed = tomllib.loads(f"value = {value.strip()}")
    except tomllib.TOMLDecodeError:
        return keys, value.strip()
    # A line break in the value would smuggle in further keys.
    return keys, parsed["value"] if len(parsed) == 1 else value.strip()


def _assign(values: dict[str, Any], keys: Keys, value: Any, text: str) -> None:
    for key in keys[:-1]:
        inner = values.get(key, {})
        if isinstance(inner, str):  # the short form of a table with nothing but a name
            inner = {"name": inner}
        if not isinstance(inner, Mapping):
            raise ConfigError(f"--set {text}: {key!r} is {inner!r}, not a section.")
        values[key] = dict(inner)
        values = values[key]
    values[keys[-1]] = value


def from_data(cls: type[T], values: Mapping[str, Any], source: str = "the configuration") -> T:
    """A dataclass from plain data; the inverse of `to_data`."""
    return Table(values, Source(source)).build(cls)


def from_json(cls: type[T], text: str, source: str = "config.json") -> T:
    """A dataclass from JSON; the inverse of `to_json`."""
    try:
        values = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{source} is not valid JSON: {error}") from error
    if not isinstance(values, Mapping):
        raise ConfigError(f"{source} must hold a table, got {type(values).__name__}.")
    return from_data(cls, values, source)


def to_json(config: Any) -> str:
    """Settings as JSON text, with a newline at the end; numbers JSON does not know are written as strings."""
    return json.dumps(to_data(config), indent=2, allow_nan=False, ensure_ascii=False) + "\n"


def to_data(value: Any) -> Any:
    """Settings as dictionaries, lists, strings and numbers."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, tuple | list):
        return [to_data(item) for item in value]
    if isinstance(value, Mapping):
        return {str(key): to_data(item) for key, item in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: to_data(getattr(value, f.name)) for f in dataclasses.fields(value) if f.init}
        return {**_name_of(value), **fields}
    raise TypeError(f"{type(value).__name__} cannot be written as plain data: {value!r}.")


def _name_of(value: Any) -> dict[str, str]:
    for base, registry in FAMILIES.items():
        if isinstance(value, base):
            for name, cls in registry.items():
                if cls is type(value):
                    return {"name": name}
            raise TypeError(f"{type(value).__name__} has no registered name, so a configuration cannot refer to it.")
    return {}


class _Builder:
    """Turns plain data into what annotations ask for."""

    def __init__(self, source: Source) -> None:
        self.source = source

    def dataclass(self, table: Any, cls: type[T], path: Keys, default: Any, extra: Keys = ()) -> T:
        """A dataclass; keys not given keep their value in `default`, if that is one of the same class."""
        if not isinstance(table, Mapping):
            self.wrong(table, f"a table ({cls.__name__})", path)
        fields = {f.name: f for f in dataclasses.fields(cls) if f.init}  # type: ignore[arg-type]
        hints = get_type_hints(cls)
        for key in table:
            if key not in fields:
                self.unknown(key, path, (*extra, *fields), hints)
        values: dict[str, Any] = {}
        for name, field in fields.items():
            at = (*path, name)
            start = getattr(default, name) if type(default) is cls else _default(field)
            if name in table:
                values[name] = self.value(table[name], hints[name], at, start)
            elif start is not MISSING:
                values[name] = start
            elif dataclasses.is_dataclass(hints[name]):
                values[name] = self.dataclass({}, hints[name], at, MISSING)  # type: ignore[arg-type]
            else:
                raise ConfigError(f"{self.source.within(path)}: {_dotted(at)} is missing; {_expected(hints[name])}.")
        try:
            return cls(**values)
        except (TypeError, ValueError) as error:
            section = f"[{_dotted(path)}] " if path else ""
            raise ConfigError(f"{self.source.within(path)}: {section}{error}") from error

    def named(self, value: Any, base: type, path: Keys, default: Any) -> Any:
        """A member of a family. Without a name, the default with some settings changed."""
        if isinstance(value, base):
            return value
        table = {"name": value} if isinstance(value, str) else value
        if not isinstance(table, Mapping):
            self.wrong(value, f'a name or a table {{name = "...", ...}} of a {base.__name__}', path)
        settings = {key: item for key, item in table.items() if key != "name"}
        kind, registry = base.__name__.lower(), FAMILIES[base]
        if "name" in table:
            if not isinstance(table["name"], str) or table["name"] not in registry:
                error = str(unknown_name(kind, table["name"], registry))
                if str(table["name"]).startswith("hyper:"):
                    error += (
                        " A learned solver belongs to the weights it was fitted to: `evaluate --solver` takes one, and"
                    )
                    error += " [alternate] fits one during training."
                raise ConfigError(f"{self.source.of((*path, 'name'))}: {error}")
            cls, default = registry[table["name"]], MISSING
        elif isinstance(default, base):
            cls = type(default)
        else:
            raise ConfigError(
                f"{self.source.within(path)}: {_dotted((*path, 'name'))} is missing; expected one of "
                f"{', '.join(sorted(registry))}."
            )
        if not dataclasses.is_dataclass(cls):
            raise ConfigError(f"{self.source.of(path)}: {cls.__name__} has no settings that a table could give.")
        return self.dataclass(settings, cls, path, default, extra=("name",))

    def value(self, value: Any, kind: Any, path: Keys, default: Any = MISSING) -> Any:
        """`value` as its annotation `kind` wants it."""
        origin = get_origin(kind)
        if kind is Any:
            return value
        if origin in (Union, types.UnionType):
            return self.union(value, kind, path, default)
        if origin is Literal:
            if value not in get_args(kind):
                error = unknown_name("choice", value, [str(choice) for choice in get_args(kind)])
                raise ConfigError(f"{self.source.of(path)}: {_dotted(path)}: {error}")
            return value
        if origin is tuple or kind is tuple:
            return self.items(value, kind, path)
        if origin is dict or kind is dict:
            return self.mapping(value, kind, path)
        if kind in FAMILIES:
            return self.named(value, kind, path, default)
        if dataclasses.is_dataclass(kind):
            return value if isinstance(value, kind) else self.dataclass(value, kind, path, default)  # type: ignore
        if kind is Path and isinstance(value, str | Path):
            return Path(value)
        if kind is float and isinstance(value, str) and value in _NONFINITE:
            return _NONFINITE[value]
        if kind is float and type(value) is int:
            return float(value)
        if kind not in _SCALARS and kind is not Path:
            raise TypeError(f"{_dotted(path)}: settings of type {kind!r} are not supported.")
        if type(value) is not kind:
            self.wrong(value, _words(kind), path)
        return value

    def union(self, value: Any, kind: Any, path: Keys, default: Any) -> Any:
        members = [member for member in get_args(kind) if member is not type(None)]
        if len(members) < len(get_args(kind)) and value in (None, "none"):  # TOML has no word of its own for it
            return None
        if len(members) == 1:
            return self.value(value, members[0], path, default)
        if type(value) in members:
            return value
        for member in members:
            try:
                return self.value(value, member, path, default)
            except ConfigError:
                continue
        return self.wrong(value, _words(kind), path)

    def items(self, value: Any, kind: Any, path: Keys) -> tuple[Any, ...]:
        if not isinstance(value, list | tuple):
            self.wrong(value, _words(kind), path)
        kinds = get_args(kind) or (Any, ...)
        if kinds[-1] is ...:
            kinds = (kinds[0],) * len(value)
        elif len(kinds) != len(value):
            self.wrong(value, _words(kind), path)
        return tuple(
            self.value(item, inner, (*path, str(i))) for i, (item, inner) in enumerate(zip(value, kinds, strict=True))
        )

    def mapping(self, value: Any, kind: Any, path: Keys) -> dict[str, Any]:
        if not isinstance(value, Mapping):
            self.wrong(value, "a table", path)
        inner = get_args(kind)[1] if get_args(kind) else Any
        return {str(key): self.value(item, inner, (*path, str(key))) for key, item in value.items()}

    def wrong(self, value: Any, expected: str, path: Keys) -> Any:
        given = "none" if value is None else f"{value!r} ({type(value).__name__})"
        name = _dotted(path) or "the top level"
        raise ConfigError(f"{self.source.of(path)}: {name}: expected {expected}, got {given}.")

    def unknown(self, key: str, path: Keys, known: Iterable[str], hints: Mapping[str, Any]) -> None:
        kind = f"key in [{_dotted(path)}]" if path else "key or section"
        inside = [name for name in known if key in _field_names(hints.get(name))]
        if inside:  # the right word in the wrong place
            error = f"unknown {kind} {key!r}; did you mean {_dotted((*path, inside[0], key))!r}?"
        else:
            error = str(unknown_name(kind, key, known))
        raise ConfigError(f"{self.source.of((*path, str(key)))}: {error}")


def _default(field: "dataclasses.Field[Any]") -> Any:
    return field.default if field.default_factory is MISSING else field.default_factory()


def _field_names(kind: Any) -> list[str]:
    return [f.name for f in dataclasses.fields(kind)] if dataclasses.is_dataclass(kind) else []


def _dotted(path: Keys) -> str:
    return ".".join(path)


def _expected(kind: Any) -> str:
    return f"expected {_words(kind)}"


def _words(kind: Any) -> str:
    """What an annotation accepts, in words."""
    origin, args = get_origin(kind), get_args(kind)
    if kind in _SCALARS:
        return _SCALARS[kind]
    if kind is type(None):
        return '"none"'
    if origin in (Union, types.UnionType):
        return " or ".join(_words(member) for member in args)
    if origin is Literal:
        return "one of " + ", ".join(repr(choice) for choice in args)
    if origin is tuple and args[-1] is ...:
        return f"a list, each item {_words(args[0])}"
    if origin is tuple:
        return f"a list of {len(args)}: " + ", ".join(_words(arg) for arg in args)
    if kind in FAMILIES:
        return f"a {kind.__name__.lower()} by name ({', '.join(sorted(FAMILIES[kind]))})"
    if dataclasses.is_dataclass(kind):
        return f"a table ({getattr(kind, '__name__', kind)})"
    return "a path" if kind is Path else "a table" if origin is dict else str(kind)
