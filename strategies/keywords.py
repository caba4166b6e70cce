"""Keyword arguments of the Flower strategies: the rule's hyper-parameters, this package's options, Flower's own."""

from __future__ import annotations

import difflib
import inspect
from dataclasses import fields
from typing import Any, TypeVar

from .engine import Options
from .rules import Rule

Base = TypeVar("Base")


def signature(rule_class: type[Rule], flower_class: type, *more: inspect.Parameter) -> inspect.Signature:
    """The signature that ``help()`` shows: keyword-only, in the order rule, options, Flower."""
    parameters: dict[str, inspect.Parameter] = {}
    own = [
        *inspect.signature(rule_class).parameters.values(),
        *inspect.signature(Options).parameters.values(),
        *more,
    ]
    for parameter in (*own, *_flower_parameters(flower_class)):
        parameters.setdefault(parameter.name, parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))
    return inspect.Signature(list(parameters.values()))


def subclass(base: type[Base], rule_class: type[Rule], flower_class: type, *more: inspect.Parameter) -> type[Base]:
    """A strategy class for a rule, to be found in the package that `base` belongs to."""
    public = base.__module__.rpartition(".")[0] if base.__module__.endswith(".message") else base.__module__
    members = {
        "rule_class": rule_class,
        "__doc__": rule_class.__doc__,
        "__module__": public,
        "__signature__": signature(rule_class, flower_class, *more),
    }
    return type(rule_class.__name__, (base,), members)


def split(
    name: str, rule_class: type[Rule], flower_class: type, keywords: dict[str, Any]
) -> tuple[Rule, Options, dict[str, Any]]:
    """Sort keyword arguments.

    Parameters
    ----------
    name : str
        The strategy's name, for the error.
    rule_class, flower_class : type
        Whose parameters are accepted.
    keywords : dict
        What the caller wrote.

    Returns
    -------
    tuple of (Rule, Options, dict)
        The rule, the options, and what is left for Flower's class.

    Raises
    ------
    TypeError
        If a keyword belongs to none of the three; the message names it and the nearest known one.
    """
    known = signature(rule_class, flower_class).parameters
    for keyword in keywords:
        if keyword not in known:
            near = difflib.get_close_matches(keyword, known, 1)
            hint = f"; did you mean {near[0]!r}?" if near else f"; see help({name})"
            raise TypeError(f"{name}() got an unexpected keyword argument {keyword!r}{hint}")
    rule_names = {f.name for f in fields(rule_class)}
    option_names = {f.name for f in fields(Options)}
    rule = rule_class(**{k: v for k, v in keywords.items() if k in rule_names})
    options = Options(**{k: v for k, v in keywords.items() if k in option_names})
    return rule, options, {k: v for k, v in keywords.items() if k not in rule_names | option_names}


def _flower_parameters(flower_class: type) -> list[inspect.Parameter]:
    return [p for p in inspect.signature(flower_class).parameters.values() if p.name != "self"]
