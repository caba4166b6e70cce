"""The closing report's picture: accuracy per client, and convergence."""

from __future__ import annotations

import io
import textwrap
from itertools import pairwise
from typing import TYPE_CHECKING, Final

import matplotlib as mpl
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure  # not pyplot: it keeps global state, and runs report from a thread
from matplotlib.ticker import MaxNLocator, PercentFormatter

from server_app.labels import count, shared_setting

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from matplotlib.axes import Axes

    from server_app.finished_runs import RunResults

__all__ = ["draw", "picture"]

_DOTS_PER_INCH = 150
_WIDTH, _HEIGHT = 12.0, 4.6
# Okabe and Ito's palette, which colour-blind readers can tell apart. FedPCD and FedAvg keep theirs in every picture.
_COLOURS: Final[Mapping[str, str]] = {"fedpcd": "#0072B2", "fedavg": "#D55E00"}
_OTHER_COLOURS: Final = ("#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_PALEST = 0.6
_INK = "#333333"
_CURVES: Final = (("mean", "mean", "-"), ("worst-10", "worst 10%", (0, (3, 1.5))))
_LABEL_HEIGHT = 0.055
"""Least distance of two labels beside the curves, in units of accuracy."""
_CURVES_WITH_LABELS = 4
_LONGEST_LABEL = 18
"""Characters of a run's label that fit beside the curves without squeezing them."""
_LEGEND_CHARACTERS = 150
_TOP = 1.12
"""Upper end of the accuracy axis: room for words above 100%."""


def picture(runs: Sequence[RunResults]) -> bytes:
    """Draw runs and encode the drawing.

    Parameters
    ----------
    runs : sequence of RunResults
        At least one of them evaluated.

    Returns
    -------
    bytes
        A PNG file; the same runs always give the same bytes.
    """
    buffer = io.BytesIO()
    draw(runs).savefig(buffer, format="png", dpi=_DOTS_PER_INCH)
    return buffer.getvalue()


def draw(runs: Sequence[RunResults]) -> Figure:
    """Draw the accuracies per client beside the convergence.

    Up to two runs with short labels have their curves named where they end; otherwise a legend stands below.

    Parameters
    ----------
    runs : sequence of RunResults
        At least one of them evaluated.

    Returns
    -------
    Figure
        The drawing.
    """
    colours = _colours([run.strategy for run in runs])
    beside = len(runs) * len(_CURVES) <= _CURVES_WITH_LABELS and max(len(run.label) for run in runs) <= _LONGEST_LABEL
    names, columns = _legend([run.label for run in runs])
    rows = 0 if beside else -(-len(names) // columns) * max(name.count("\n") + 1 for name in names)
    with mpl.rc_context({"font.size": 10, "axes.edgecolor": _INK, "text.color": _INK, "axes.labelcolor": _INK}):
        figure = Figure(figsize=(_WIDTH, _HEIGHT + 0.25 * rows), layout="constrained")
        clients, convergence = figure.subplots(1, 2)
        if setting := shared_setting(runs):
            figure.suptitle("\n".join(textwrap.wrap(setting, 120)), fontsize=11)
        _draw_clients(clients, runs, colours)
        _draw_convergence(convergence, runs, colours, label_ends=beside)
        if beside:
            clients.legend(frameon=False, loc="best")
        else:
            figure.legend(
                clients.get_lines(), names, loc="outside lower center", ncols=columns, frameon=False, markerscale=1.5
            )
    return figure


def _legend(names: Sequence[str]) -> tuple[list[str], int]:
    """Fold long names and find the number of columns that fit side by side."""
    folded = [textwrap.fill(name, 60) for name in names]
    widest = max(len(line) for name in folded for line in name.split("\n"))
    most = max(1, min(len(folded), _LEGEND_CHARACTERS // (widest + 8)))
    rows = -(-len(folded) // most)
    return folded, -(-len(folded) // rows)  # rows of about the same length


def _colours(strategies: Sequence[str]) -> list[str]:
    """Give each run a colour of its own; several runs of several methods have their method's colour in shades."""
    methods = list(dict.fromkeys(strategies))
    if len(methods) in (1, len(strategies)):
        return _palette(strategies)
    base = dict(zip(methods, _palette(methods), strict=True))
    shades = []
    for place, strategy in enumerate(strategies):
        paleness = _PALEST * strategies[:place].count(strategy) / max(1, strategies.count(strategy) - 1)
        red, green, blue = (value + (1 - value) * paleness for value in to_rgb(base[strategy]))
        shades.append(to_hex((red, green, blue)))
    return shades


def _palette(strategies: Sequence[str]) -> list[str]:
    """FedPCD and FedAvg get their colours, once; others the next free one; a map of colours where these run out."""
    free = iter(_OTHER_COLOURS)
    colours: list[str] = []
    for strategy in strategies:
        own = _COLOURS.get(strategy)
        colour = own if own is not None and own not in colours else next(free, None)
        if colour is None:
            return [to_hex(mpl.colormaps["turbo"](place / (len(strategies) - 1))) for place in range(len(strategies))]
        colours.append(colour)
    return colours


def _draw_clients(axes: Axes, runs: Sequence[RunResults], colours: Sequence[str]) -> None:
    sizes = {len(run.accuracies) for run in runs if run.accuracies}
    most = max(sizes)
    for run, colour in zip(runs, colours, strict=True):
        ascending = sorted(run.accuracies.values())
        ranks = [float(rank) for rank in range(1, len(ascending) + 1)]
        axes.plot(
            ranks if len(sizes) == 1 else [(rank - 0.5) / len(ranks) for rank in ranks],
            ascending,
            color=colour,
            linewidth=1.2,
            marker="o",
            markersize=max(2.0, 5.0 - most / 40),
            label=run.label,
        )
    axes.set_title(f"Test accuracy of {'each' if most > 1 else 'the only'} client {_end(runs)}", fontsize=11)
    _style(axes)
    if len(sizes) > 1:
        axes.set_xlabel("share of the clients, from worst to best served")
        axes.set_xlim(0.0, 1.0)
        axes.xaxis.set_major_locator(MaxNLocator(5))
        axes.xaxis.set_major_formatter(PercentFormatter(xmax=1.0, decimals=0))
        _mark_worst(axes, 0.0, 0.1)
        return
    axes.set_xlabel("clients, from worst to best served" if most > 1 else "client")
    axes.set_xlim(0.5, most + 0.5)
    if most > 1:
        _mark_worst(axes, 0.5, -(-most // 10) + 0.5)


def _mark_worst(axes: Axes, start: float, end: float) -> None:
    """Shade the worst 10% of the clients, and say so inside of the shade."""
    axes.axvspan(start, end, color="#000000", alpha=0.06, linewidth=0)
    left, right = axes.get_xlim()
    words = "worst 10%" if (end - start) / (right - left) > 0.2 else "worst\n10%"
    axes.text((start + end) / 2, _TOP - 0.01, words, ha="center", va="top", fontsize=8, linespacing=1.0)


def _end(runs: Sequence[RunResults]) -> str:
    last = {max(run.evaluations) for run in runs if run.evaluations}
    return f"after {count(last.pop(), 'round')}" if len(last) == 1 else "at the end"


def _draw_convergence(axes: Axes, runs: Sequence[RunResults], colours: Sequence[str], *, label_ends: bool) -> None:
    ends = []
    several = any(len(run.accuracies) > 1 for run in runs)  # one client's worst 10% is its mean
    width = 1.6 if label_ends else 1.2
    for run, colour in zip(runs, colours, strict=True):
        rounds = list(run.evaluations)
        for name, words, dashes in _CURVES if several else _CURVES[:1]:
            values = [evaluation[name] for evaluation in run.evaluations.values()]
            marker = "o" if len(values) == 1 else None  # a line through one point cannot be seen
            axes.plot(rounds, values, color=colour, linestyle=dashes, linewidth=width, marker=marker, clip_on=False)
            if values:
                ends.append((values[-1], f"{run.label}, {words} {values[-1]:.1%}", colour))
    if label_ends:
        _label_ends(axes, ends)
    axes.set_title("Convergence: mean (solid), worst 10% (dashed)" if several else "Convergence", fontsize=11)
    axes.set_xlabel("round")
    axes.set_xlim(0, max(1, *(max(run.evaluations, default=0) for run in runs)))
    _style(axes)


def _label_ends(axes: Axes, ends: list[tuple[float, str, str]]) -> None:
    """Write each curve's name beside its end, moved up or down where two would overlap."""
    ends = sorted(ends)
    heights = [value for value, _, _ in ends]
    for lower, upper in pairwise(range(len(heights))):
        heights[upper] = max(heights[upper], heights[lower] + _LABEL_HEIGHT)
    ceiling = 1.0 + _LABEL_HEIGHT
    for index in reversed(range(len(heights))):
        ceiling = heights[index] = min(heights[index], ceiling - _LABEL_HEIGHT)
    for height, (_, text, colour) in zip(heights, ends, strict=True):
        axes.text(1.015, height, text, color=colour, va="center", transform=axes.get_yaxis_transform())


def _style(axes: Axes) -> None:
    axes.set_ylabel("test accuracy")
    axes.set_ylim(0.0, _TOP)
    axes.set_yticks([0.0, 0.2, 0.4, 0.6, 0.8, 1.0])
    axes.yaxis.set_major_formatter(PercentFormatter(xmax=1.0, decimals=0))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10], min_n_ticks=1))
    axes.grid(axis="y", color="#DDDDDD", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
