"""What a method's docstring says, in parts: for the docs pages, the table of methods and the command line."""

from __future__ import annotations

import dataclasses
import inspect
import re
from dataclasses import dataclass

from .rules import Rule

_LABELS = ("Needs", "Guarantees", "Cost", "Use it when")
_SECTION = re.compile(r"^(\w+)\n-+\n", flags=re.MULTILINE)


@dataclass(frozen=True)
class Description:
    """A method's documentation, taken apart.

    Parameters
    ----------
    name : str
        Its name in run-config.
    title : str
        Its class name.
    summary : str
        One sentence: what direction it returns.
    formula : str
        What follows the summary, Markdown.
    needs, guarantees, cost, use : str
        The labelled lines, without their label.
    hyper_parameters : dict of str to str
        Defaults by run-config key, as TOML values.
    parameters, notes, references : str
        The numpydoc sections' text.
    """

    name: str
    title: str
    summary: str
    formula: str
    needs: str
    guarantees: str
    cost: str
    use: str
    hyper_parameters: dict[str, str]
    parameters: str
    notes: str
    references: str


def describe(name: str, rule: type[Rule]) -> Description:
    """Take a method's docstring apart.

    Parameters
    ----------
    name : str
        Its name in the registry.
    rule : type
        Its rule.

    Returns
    -------
    Description
        Parts that the docstring does not have are empty.
    """
    head, *rest = _SECTION.split(inspect.getdoc(rule) or "")
    sections = dict(zip(rest[::2], (text.strip() for text in rest[1::2]), strict=True))
    paragraphs = [" ".join(paragraph.split()) for paragraph in head.split("\n\n") if paragraph.strip()]
    labelled = {label: _labelled(paragraphs, label) for label in _LABELS}
    plain = [p for p in paragraphs if not p.startswith(tuple(f"{label}" for label in _LABELS))]
    return Description(
        name=name,
        title=rule.__name__,
        summary=plain[0] if plain else "",
        formula="\n\n".join(plain[1:]),
        needs=labelled["Needs"],
        guarantees=labelled["Guarantees"],
        cost=labelled["Cost"],
        use=labelled["Use it when"],
        hyper_parameters={f.name.replace("_", "-"): _default(f) for f in dataclasses.fields(rule)},
        parameters=sections.get("Parameters", ""),
        notes=sections.get("Notes", ""),
        references=sections.get("References", ""),
    )


def _labelled(paragraphs: list[str], label: str) -> str:
    found = next((p for p in paragraphs if p.startswith(label)), "")
    return found.removeprefix(label).lstrip(": ")


def _default(field: dataclasses.Field[object]) -> str:
    if field.default is dataclasses.MISSING:
        return "(required)"
    if isinstance(field.default, bool):
        return str(field.default).lower()
    return f"'{field.default}'" if isinstance(field.default, str) else str(field.default)
