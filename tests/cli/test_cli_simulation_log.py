"""What of a simulation's log is shown."""

from __future__ import annotations

import pytest

from cli.simulation_log import readable

GREEN, YELLOW, CYAN, RESET = "\x1b[92m", "\x1b[93m", "\x1b[36m", "\x1b[0m"
INFO, WARNING = f"{GREEN}INFO {RESET}:      ", f"{YELLOW}WARNING {RESET}:   "

NOISE = [
    f"{WARNING}Since flwr 1.32, default simulated SuperNodes changed from 10 to 2.",
    f"{INFO}To change federation size, use the following command:",
    f"{INFO}\tflwr federation simulation-config @none/default <superlink> --num-supernodes <N>",
    "Successfully installed fedpcd to /tmp/fedpcd-x76y_hmu/flwr/apps/fedpcd.fedpcd.0.1.0.389c0cb4.",
    f"{CYAN}(ClientAppActor pid=30007){RESET} {WARNING}Manually terminating ClientAppActor",
    INFO,
    "/venv/site-packages/ray/_private/worker.py:2051: FutureWarning: Tip: In future versions of Ray, ...",
]
KEPT = [
    f"{INFO}Starting Flower Simulation",
    f"{INFO}Federation `@none/default` (4 simulated SuperNodes)",
    f"{WARNING}\t> client 3 (invalid): the update is not finite",
    f"{INFO}\t├──> Rule: FedPCD(tau=0.02)",
    "round 1/3  FedPCD  mean  16.4%  worst 10%   3.8%",
    "",
    "  warnings.warn(",
    "/venv/site-packages/torch/x.py:1: FutureWarning: something of another package",
    "(ClientAppActor pid=7) Traceback (most recent call last):",
    "picture  /home/me/results/run/comparison.png",
]


@pytest.mark.parametrize("line", NOISE)
@pytest.mark.parametrize("coloured", [True, False])
def test_lines_that_look_like_faults_and_are_none_are_left_out(line, coloured):
    assert list(readable([line + "\n"], coloured=coloured)) == []


def test_everything_else_passes_as_it_came_on_a_terminal():
    lines = [line + "\n" for line in KEPT]
    assert list(readable(lines, coloured=True)) == lines


def test_there_are_no_control_characters_where_no_terminal_reads():
    shown = "".join(readable([line + "\n" for line in KEPT], coloured=False))
    assert "\x1b" not in shown
    assert shown.startswith("INFO :      Starting Flower Simulation\nINFO :      Federation ")


def test_the_code_line_of_a_warning_goes_with_it_and_no_other():
    lines = [NOISE[-1] + "\n", "  warnings.warn(\n", "  warnings.warn(\n"]
    assert list(readable(lines, coloured=False)) == ["  warnings.warn(\n"]
