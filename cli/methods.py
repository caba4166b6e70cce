"""The table of methods, read from the library's registry."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from typing import Any

from rich.table import Table


def registry() -> dict[str, type[Any]]:
    """``METHODS`` of the library beside this package: ``fedpcd`` installed, ``strategies`` in a checkout."""
    library = (__package__ or "").rpartition(".")[0] or "strategies"
    methods: dict[str, type[Any]] = importlib.import_module(library).METHODS
    return methods


def describe(strategy: type[Any]) -> tuple[str, str]:
    """Hyper-parameters with their defaults, as run-config keys, and the first line of the documentation."""
    fields = dataclasses.fields(strategy.rule_class)
    hyper_parameters = "  ".join(f"{field.name.replace('_', '-')}={_default(field)}" for field in fields)
    documentation = inspect.getdoc(strategy) or ""
    return hyper_parameters, documentation.partition("\n")[0]


def _default(field: dataclasses.Field[Any]) -> str:
    if field.default is dataclasses.MISSING:
        return "(required)"
    return str(field.default).lower() if isinstance(field.default, bool) else str(field.default)


def methods_table() -> Table:
    """Name, hyper-parameters and purpose of every registered method."""
    table = Table(title="methods: -c strategy=NAME, or --compare-with NAME")
    for heading in ("name", "hyper-parameters", "what it does"):
        table.add_column(heading, overflow="fold")
    for name, strategy in registry().items():
        table.add_row(name, *describe(strategy))
    return table
