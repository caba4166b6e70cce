"""A folder with a Flower app, and what its pyproject.toml declares."""

from __future__ import annotations

import importlib
import sys
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

from .errors import UsageError

Value = bool | int | float | str
"""A run-config value: what Flower can transport."""

APP_PACKAGES = ("client_app", "server_app", "strategies")
"""The top-level packages of the app."""

APP_EXTRA = {
    "matplotlib": "matplotlib",
    "ray": "ray",
    "safetensors": "safetensors",
    "scikit-learn": "sklearn",
    "torch": "torch",
    "torchvision": "torchvision",
}
"""Distribution and import name of what the app cannot start without."""


INSTALL = "pip install '.[app]' in the project's folder"
"""What to do when something is missing."""


@dataclass(frozen=True)
class AppFolder:
    """A Flower app on disk.

    Parameters
    ----------
    path : Path
        Absolute path of the folder that holds ``pyproject.toml``.
    declared : dict of str to Value
        The run-config keys with their defaults, in the order of declaration.
    """

    path: Path
    declared: dict[str, Value]

    @classmethod
    def at(cls, path: Path) -> AppFolder:
        """Read the app in `path`.

        Raises
        ------
        UsageError
            If there is no Flower app in that folder.
        """
        path = path.expanduser().resolve()
        file = path / "pyproject.toml"
        if not file.is_file():
            raise UsageError(f"no pyproject.toml in {path}: go to the app's folder or pass it as APP_DIR")
        try:
            app = tomllib.loads(file.read_text(encoding="utf-8"))["tool"]["flwr"]["app"]
            components = app["components"]
        except (KeyError, tomllib.TOMLDecodeError) as error:
            raise UsageError(f"{file} does not describe a Flower app: {error}") from error
        if components.get("serverapp") != "server_app.app:app":
            raise UsageError(f"{file} describes another Flower app ({components}); `flwr run` can run it")
        return cls(path, flatten(app.get("config", {})))

    def module(self, name: str) -> ModuleType:
        """Import a module of this app, e.g. ``server_app.app``; needs what the extra ``app`` installs."""
        require_app_extra()
        if str(self.path) not in sys.path:
            sys.path.insert(0, str(self.path))
        return importlib.import_module(name)

    def check(self, run_config: Mapping[str, Value]) -> None:
        """Have the app check a run config as its ServerApp will, before anything is started.

        An app without ``server_app.config.ServerConfig`` checks its values when it runs.

        Raises
        ------
        UsageError
            With the app's words about the value that it refuses.
        """
        if not (self.path / "server_app" / "config.py").is_file():
            return
        module = self.module("server_app.config")
        if not hasattr(module, "ServerConfig"):
            return
        try:
            module.ServerConfig.from_run_config(run_config)
        except ValueError as error:  # ConfigError
            raise UsageError(str(error)) from error


def flatten(table: dict[str, object], prefix: str = "") -> dict[str, Value]:
    """Nested tables as dotted keys, which is how Flower names them.

    Raises
    ------
    UsageError
        If a value is neither bool, int, float nor str.
    """
    flat: dict[str, Value] = {}
    for key, value in table.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict):
            flat |= flatten(value, f"{name}.")
        elif isinstance(value, bool | int | float | str):
            flat[name] = value
        else:
            raise UsageError(f"{name} = {value!r}: a run-config value is a bool, an int, a float or a string")
    return flat


def require_app_extra() -> None:
    """Refuse with one clear line when the packages of the extra ``app`` are missing.

    Raises
    ------
    UsageError
        Names what is missing and the command that installs it.
    """
    missing = [name for name, module in APP_EXTRA.items() if find_spec(module) is None]
    if missing:
        raise UsageError(f"not installed: {', '.join(missing)}. The app needs the extra `app`: {INSTALL}")
