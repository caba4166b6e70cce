"""The table of methods and the account of one method, read from the library's docstrings."""

from __future__ import annotations

import importlib
from typing import Any

from rich.table import Table

from .errors import UsageError


def descriptions() -> dict[str, Any]:
    """A `Description` per method of the library beside this package (``fedpcd``; ``strategies`` in a checkout)."""
    library = (__package__ or "").rpartition(".")[0] or "strategies"
    describe = importlib.import_module(f"{library}.describe").describe
    rules = importlib.import_module(f"{library}.rules").RULES
    return {name: describe(name, rule) for name, rule in rules.items()}


def methods_table() -> Table:
    """Name, purpose, needs and hyper-parameters of every registered method."""
    table = Table(title="methods: -c \"strategy='NAME'\", or --compare-with NAME; fedpcd methods NAME tells more")
    for heading in ("name", "what it does", "asks clients for", "hyper-parameters"):
        table.add_column(heading, overflow="fold")
    for name, method in descriptions().items():
        defaults = "  ".join(f"{key}={value}" for key, value in method.hyper_parameters.items())
        table.add_row(name, method.summary, method.needs, defaults)
    return table


def account(name: str) -> str:
    """What a method is, in plain text.

    Raises
    ------
    UsageError
        If there is no such method.
    """
    known = descriptions()
    if name not in known:
        raise UsageError(f"there is no method {name!r}; there are {', '.join(known)}")
    method = known[name]
    parts = [
        f"{method.title}  (strategy='{name}')",
        method.summary,
        method.formula,
        f"Needs: {method.needs}",
        f"Guarantees: {method.guarantees}",
        f"Cost: {method.cost}",
        f"Use it when {method.use}",
        method.parameters,
        method.notes,
        method.references,
    ]
    return "\n\n".join(part for part in parts if part)
