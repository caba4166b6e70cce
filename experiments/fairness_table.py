r"""The table of docs/comparison.md: finished runs of several seeds, averaged per method.

    for seed in 0 1 2; do
      fedpcd run . --preset fashion-mnist --engine in-process --results-dir results/table \
        --compare-with "fedavg,afl,qfedavg,ditto,fedmgda-plus,fedfv,fedlf,fedheal,fedpw,craft" \
        -c "seed=$seed tau=0.02 evaluate-every=25 run-name='seed$seed'"
    done
    python experiments/fairness_table.py results/table/*

Means over seeds, with the population standard deviation over seeds where there are several. Accuracies are those of the
last round's model on every client's own test examples.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections import defaultdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from server_app.finished_runs import RunResults, find_runs, load_run

COLUMNS = {"mean": "mean", "sigma-c": "sigma_c", "worst-10": "worst 10%", "best-10": "best 10%", "jain": "Jain"}


def average(values: list[float], percent: bool) -> str:
    """Mean and spread over seeds, as a cell."""
    scale, digits = (100.0, 1) if percent else (1.0, 3)
    middle, spread = statistics.fmean(values) * scale, statistics.pstdev(values) * scale
    return f"{middle:.{digits}f} ± {spread:.{digits}f}" if len(values) > 1 else f"{middle:.{digits}f}"


def rows(runs: list[RunResults]) -> dict[str, list[dict[str, float]]]:
    """Final fairness metrics of every run by row label; other models of a method get rows of their own."""
    found: defaultdict[str, list[dict[str, float]]] = defaultdict(list)
    for run in runs:
        if run.final is None or run.summary.get("status") != "completed":
            sys.exit(f"{run.folder} is no completed run: leave it out, or run it again")
        found[run.label].append(run.final)
        for variant, metrics in run.final.get("variants", {}).items():
            found[f"{run.label}: {variant.replace('-', ' ')}"].append(metrics)
    return found


def main() -> None:
    """Print the table, Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path, help="results folders, one per seed")
    runs = [load_run(folder) for folder in find_runs(parser.parse_args().folders)]
    print("| method | seeds | " + " | ".join(COLUMNS.values()) + " |")
    print("|---|---|" + "---|" * len(COLUMNS))
    for label, metrics in rows(runs).items():
        cells = [average([m[key] for m in metrics], key != "jain") for key in COLUMNS]
        print(f"| {label} | {len(metrics)} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
