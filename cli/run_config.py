"""Run-config values from presets and ``-c key=value``, held against what the app declares."""

from __future__ import annotations

import difflib
import shlex
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path

from .app_folder import AppFolder, Value, flatten
from .errors import UsageError


def overrides(app: AppFolder, preset: str | None, assignments: Iterable[str]) -> dict[str, Value]:
    """Collect what differs from the declared defaults; later sources win.

    Parameters
    ----------
    app : AppFolder
        Declares the keys and, through its defaults, their types.
    preset : str or None
        Name of a file in the app's ``presets`` folder, or a path to a TOML file.
    assignments : iterable of str
        Each holds ``key=value`` pairs separated by blanks, or is the path of a TOML file.

    Returns
    -------
    dict of str to Value
        Every value has the type of the declared default.

    Raises
    ------
    UsageError
        For an unknown key, a value of the wrong type or a file that cannot be read.
    """
    chosen = {} if preset is None else _from_file(app, preset_file(app, preset))
    for text in assignments:
        chosen |= _from_file(app, Path(text)) if text.endswith(".toml") else parse(text, app.declared)
    return chosen


def preset_file(app: AppFolder, preset: str) -> Path:
    """Path of a preset given by name or by path.

    Raises
    ------
    UsageError
        If there is no such preset; names those that exist.
    """
    for candidate in (app.path / "presets" / f"{preset}.toml", Path(preset).expanduser()):
        if candidate.is_file():
            return candidate
    names = sorted(file.stem for file in (app.path / "presets").glob("*.toml"))
    raise UsageError(f"no preset {preset!r}: choose {', '.join(names) or 'a TOML file'}")


def parse(text: str, declared: Mapping[str, Value]) -> dict[str, Value]:
    """Read ``key=value`` pairs; quotes protect blanks and may be left out otherwise.

    Parameters
    ----------
    text : str
        E.g. ``tau=0.02 strategy=fedavg run-name='a b'``.
    declared : mapping of str to Value
        The known keys; the type of each default decides how its value is read.

    Raises
    ------
    UsageError
        For a pair without ``=``, an unknown key or a value that does not fit.
    """
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise UsageError(f"-c {text!r}: {error}") from error
    values: dict[str, Value] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals:
            raise UsageError(f"-c {word!r}: write key=value, or name a TOML file (its name ends with .toml)")
        _check_key(key, declared)
        values[key] = _read(key, value, declared[key])
    return values


def _from_file(app: AppFolder, file: Path) -> dict[str, Value]:
    try:
        table = tomllib.loads(file.expanduser().read_text(encoding="utf-8"))
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise UsageError(f"cannot read {file}: {error}") from error
    values: dict[str, Value] = {}
    for key, value in flatten(table).items():
        _check_key(key, app.declared, f" in {file}")
        values[key] = _fit(key, value, app.declared[key])
    return values


def _check_key(key: str, declared: Mapping[str, Value], where: str = "") -> None:
    if key not in declared:
        near = difflib.get_close_matches(key, declared, n=1, cutoff=0.0)
        hint = f": did you mean {near[0]!r}?" if near else ""
        raise UsageError(f"unknown run-config key {key!r}{where}{hint}")


def _read(key: str, text: str, default: Value) -> Value:
    """Read `text` as a value of the default's type."""
    kind = type(default)
    if isinstance(default, str):
        return text
    if isinstance(default, bool):
        if text not in ("true", "false"):
            raise UsageError(f"{key} = {text!r}: write true or false")
        return text == "true"
    try:
        return kind(text)
    except ValueError:
        raise UsageError(f"{key} = {text!r}: {_article(kind)} is needed") from None


def _fit(key: str, value: Value, default: Value) -> Value:
    """Check a typed value against the default's type; an int may stand for a float."""
    kind = type(default)
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not kind:
        raise UsageError(f"{key} = {value!r}: {_article(kind)} is needed")
    return value


def _article(kind: type) -> str:
    return {bool: "true or false", int: "an integer", float: "a number", str: "a string"}[kind]


def to_toml(values: Mapping[str, Value]) -> str:
    """Write flat run-config values as TOML, for ``flwr run --run-config FILE``."""
    return "".join(f"{_quote(key)} = {_literal(value)}\n" for key, value in values.items())


def _literal(value: Value) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return _quote(value) if isinstance(value, str) else repr(value)


def _quote(text: str) -> str:
    """Write `text` as a TOML basic string."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return '"' + "".join(c if c.isprintable() else f"\\U{ord(c):08x}" for c in escaped) + '"'
