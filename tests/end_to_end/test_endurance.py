"""Long runs and many runs: the server's process does not grow, and nothing stays behind."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.endurance import WINDOW, Sample, growth, listening, sample, slope

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


def measured(tmp_path: Path, *arguments: str) -> list[Sample]:
    """Run the benchmark in a process of its own; returns its samples."""
    file = tmp_path / "samples.json"
    command = [sys.executable, str(ROOT / "benchmarks" / "endurance.py"), "--json", str(file), *arguments]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False, timeout=840)
    assert done.returncode == 0, done.stdout + done.stderr
    [samples] = json.loads(file.read_text()).values()
    print(done.stdout)
    return [Sample(**one) for one in samples]


def assert_steady(samples: list[Sample]) -> None:
    """Fail if the process holds more files, mappings or threads at the end than when the window was full."""
    full, end = samples[2 * WINDOW : 3 * WINDOW], samples[-WINDOW:]
    assert {s.files for s in end} <= {s.files for s in full}
    assert {s.threads for s in end} <= {s.threads for s in full}
    # The allocator maps and unmaps large blocks from round to round.
    assert max(s.mappings for s in end) <= max(s.mappings for s in full) + 20


@pytest.mark.timeout(900)
def test_rounds_of_the_app_keep_the_memory_of_the_first_thirty(tmp_path: Path) -> None:
    samples = measured(tmp_path, "--rounds", "120")  # `python -m benchmarks.endurance --rounds 300` takes longer
    assert len(samples) == 120
    assert growth(samples) < 0.05
    assert slope(samples) < 64 * 2**10  # the five rows of a round, had they been kept, take 94 KiB; results take 5
    assert_steady(samples)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("method", ["fedpcd", "fedlf"])
def test_rows_of_four_megabytes_are_dropped_when_they_leave_the_window(method: str, tmp_path: Path) -> None:
    # One of the five rows of a round kept would be 4 MiB per round, 400 MiB in all. So many rounds since the number of
    # clients in the window varies by one or two: over 60 rounds that alone made a third of a MiB per round once.
    samples = measured(tmp_path, "--method", method, "--megabytes", "4", "--rounds", "120")
    assert growth(samples) < 0.05
    assert slope(samples) < 0.25 * 2**20
    assert_steady(samples)


def assert_nothing_left(samples: list[Sample], warm: int) -> None:
    """Fail if any simulation left something; memory counts after so many of them."""
    for one in samples:
        assert (one.processes, one.ports, one.folders) == (0, 0, 0), one
    assert {s.files for s in samples[warm:]} == {samples[warm].files}
    assert {s.threads for s in samples[warm:]} == {samples[warm].threads}
    assert samples[-1].rss < 1.05 * samples[warm].rss


@pytest.mark.timeout(600)
def test_twenty_simulations_in_one_process_leave_nothing_behind(tmp_path: Path) -> None:
    samples = measured(tmp_path, "--simulations", "20")
    assert len(samples) == 21
    assert_nothing_left(samples, warm=5)


@pytest.mark.timeout(900)
def test_two_simulations_in_ray_from_one_process_leave_nothing_behind(tmp_path: Path) -> None:
    samples = measured(tmp_path, "--simulations", "2", "--engine", "ray")
    assert len(samples) == 3
    assert_nothing_left(samples, warm=1)


def keep_a_megabyte_per_sample() -> None:
    """Hold the measurement against what is known; runs in a process of its own."""
    kept, samples = [], []
    for number in range(4 * WINDOW):
        kept.append(os.urandom(2**20))
        samples.append(sample(number))
    assert slope(samples) > 0.9 * 2**20
    assert growth(samples) > 0.0
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert sample(0).files == samples[-1].files + 1
        assert server.getsockname()[1] in listening([os.getpid()])


def test_the_measurement_sees_what_is_kept() -> None:
    # A process that has run other tests keeps what it takes now in memory that it took before.
    code = "from tests.end_to_end.test_endurance import keep_a_megabyte_per_sample as check; check()"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
