"""What compared runs share and in what they differ: the title, a short label for each, and a note."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Final

from server_app.finished_runs import method_name
from strategies import METHODS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from server_app.finished_runs import RunResults

__all__ = ["count", "difference", "labels", "shared_setting"]

# Keys that say where and how long, not what; and keys of which a derived entry tells more.
_NO_SETTING: Final = frozenset(
    {
        "strategy",
        "compare-with",
        "results-dir",
        "run-name",
        "data-dir",
        "num-clients",
        "round-timeout",
        "min-nodes",
        "wait-for-nodes",
        "resume",
        "checkpoint-every",
        "checkpoint-keep",
    }
)
_HYPER_PARAMETERS: Final = frozenset(
    field.name.replace("_", "-") for method in METHODS.values() for field in dataclasses.fields(method.rule_class)
)
_USED_ONLY_IF: Final[Mapping[str, tuple[str, frozenset[str]]]] = {
    "alpha": ("partition", frozenset({"dirichlet", "dirichlet-classes"})),
    "shards-per-client": ("partition", frozenset({"shards", "pathological"})),
    "ema-beta": ("normalization", frozenset({"ema"})),
}
# Where several settings tell the same runs apart, the first one labels them.
_FIRST: Final = ("dataset", "partition", "alpha", "shards-per-client", "clients", "model")
_LAST: Final = ("seed", "evaluation", "evaluate-every", "device", "torch-threads", "code-hash")
_NOT_IN_LABELS: Final = frozenset({"code-hash"})
_LISTED_VALUES: Final = 4


def count(number: int, noun: str) -> str:
    """Return the number and the noun, in the plural unless the number is 1."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def labels(runs: Sequence[RunResults]) -> list[str]:
    """Name each run by its method and the fewest settings that tell the runs apart.

    Parameters
    ----------
    runs : sequence of RunResults
        The compared runs.

    Returns
    -------
    list of str
        One label per run, all different, e.g. ``FedPCD, seed 1``. Runs with the same settings are told apart by
        the names of their run folders, or numbered where these are the same too.
    """
    found = [_settings(run) for run in runs]
    parts = [[method_name(run.strategy)] for run in runs]
    groups = [list(range(len(runs)))]
    for key in _differing(found):
        if key in _NOT_IN_LABELS or not any(len(_values([found[i] for i in group], key)) > 1 for group in groups):
            continue
        for part, settings in zip(parts, found, strict=True):
            if key in settings:
                part.append(_words(key, settings[key]))
        groups = [part for group in groups for part in _split(group, found, key)]
    return _tell_apart([", ".join(part) for part in parts], [run.folder.parent.name for run in runs])


def difference(runs: Sequence[RunResults]) -> str:
    """Describe the settings in which runs differ.

    A hyper-parameter counts for the methods that have it.

    Parameters
    ----------
    runs : sequence of RunResults
        The compared runs.

    Returns
    -------
    str
        E.g. ``settings differ in: seed (0, 1), tau (0.02, 0.05)``; empty if they do not.
    """
    found = [_settings(run) for run in runs]
    parts = [key if key in _NOT_IN_LABELS else f"{key} ({_listed(_values(found, key))})" for key in _differing(found)]
    return f"settings differ in: {', '.join(parts)}" if parts else ""


def shared_setting(runs: Sequence[RunResults]) -> str:
    """Describe the setting that all runs share.

    Parameters
    ----------
    runs : sequence of RunResults
        The compared runs.

    Returns
    -------
    str
        E.g. ``digits, 100 clients, Dirichlet alpha 0.01, 10% per round, seed 0``; empty if they share none of these.
    """
    found = [_settings(run) for run in runs]
    keys = set.intersection(*(set(settings) for settings in found))
    shared = {key: found[0][key] for key in keys if len(_values(found, key)) == 1}
    parts = [] if any("dataset" in settings for settings in found) else ["unknown data"]
    for key in ("dataset", "clients", "partition", "fraction-train", "seed"):
        if key == "partition" and str(shared.get(key)).startswith("dirichlet"):
            parts.append(f"Dirichlet alpha {shared['alpha']:g}" if "alpha" in shared else "Dirichlet")
        elif key in shared:
            parts.append(_words(key, shared[key]))
    return ", ".join(parts)


def _settings(run: RunResults) -> dict[str, Any]:
    """Collect what may decide a run's numbers: its run config, only the hyper-parameters of its method, its code."""
    config = run.config.get("run-config", {})
    settings = {key: value for key, value in config.items() if key not in _NO_SETTING | _HYPER_PARAMETERS}
    settings |= {key.replace("_", "-"): value for key, value in run.config.get("hyper-parameters", {}).items()}
    settings["clients"] = len(run.config.get("client-ids", ()))
    if "code-hash" in run.config:
        settings["code-hash"] = run.config["code-hash"]
    if not run.config.get("divided", True):
        settings.pop("partition", None)
    for key, (other, values) in _USED_ONLY_IF.items():
        if settings.get(other) not in values:
            settings.pop(key, None)
    return settings


def _differing(found: Sequence[Mapping[str, Any]]) -> list[str]:
    keys = dict.fromkeys(key for settings in found for key in settings)
    return sorted((key for key in keys if len(_values(found, key)) > 1), key=_rank)


def _rank(key: str) -> tuple[int, int]:
    if key in _FIRST:
        return 0, _FIRST.index(key)
    if key in _LAST:
        return 3, _LAST.index(key)
    return (1, 0) if key in _HYPER_PARAMETERS else (2, 0)


def _values(found: Sequence[Mapping[str, Any]], key: str) -> list[Any]:
    """Return the different values of a setting, in order; runs without it are left out."""
    return list({repr(settings[key]): settings[key] for settings in found if key in settings}.values())


def _split(group: Sequence[int], found: Sequence[Mapping[str, Any]], key: str) -> list[list[int]]:
    parts: dict[str, list[int]] = {}
    for index in group:
        parts.setdefault(repr(found[index].get(key)), []).append(index)
    return list(parts.values())


def _tell_apart(names: Sequence[str], folders: Sequence[str]) -> list[str]:
    """Add the run folder's name, without what these names begin with in common, or a number to names that recur."""
    result = list(names)
    for name in dict.fromkeys(names):
        places = [index for index, other in enumerate(names) if other == name]
        if len(places) == 1:
            continue
        words = [folders[place].split("-") for place in places]
        while all(len(word) > 1 and word[0] == words[0][0] for word in words):
            words = [word[1:] for word in words]
        endings = ["-".join(word) for word in words]
        apart = len(set(endings)) == len(endings)
        for number, (place, ending) in enumerate(zip(places, endings, strict=True), start=1):
            result[place] = f"{name}, run {ending}" if apart else f"{name} ({number})"
    return result


def _words(key: str, value: Any) -> str:
    match key:
        case "dataset" | "partition":
            return str(value)
        case "clients":
            return count(value, "client")
        case "num-server-rounds":
            return count(value, "round")
        case "fraction-train":
            return f"{value:.0%} per round" if round(value, 2) == value else f"{value:.2%} per round"
        case _:
            return f"{key} {_plain(value)}"


def _plain(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _listed(values: Sequence[Any]) -> str:
    texts = [_plain(value) for value in values]
    return ", ".join(texts if len(texts) <= _LISTED_VALUES else [*texts[: _LISTED_VALUES - 1], "..."])
