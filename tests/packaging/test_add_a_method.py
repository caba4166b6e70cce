"""CONTRIBUTING's recipe for a new method works as written: one file and one line."""

from __future__ import annotations

import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).parents[2]
RULE = '''
    """Median: the coordinate-wise median of the participants' displacements."""

    from __future__ import annotations

    from dataclasses import dataclass

    import numpy as np

    from .rule import Rule
    from .updates import Aggregate, State, Updates


    @dataclass(frozen=True)
    class Median(Rule):
        """The coordinate-wise median of the participants' updates."""

        def aggregate(self, updates: Updates, state: State) -> tuple[Aggregate, State]:
            return Aggregate(np.median(np.stack(updates.rows), axis=0).astype(np.float64), {"status": "solved"}), state
    '''
CHECK = """
    import numpy as np
    from strategies import METHODS, Median
    from strategies.legacy import Median as OlderMedian
    from tests.federations import run_legacy, run_message
    from tests.support import assert_same_bits, initial_model
    from server_app.config import ServerConfig

    assert METHODS["median"] is Median
    assert OlderMedian.rule_class is Median.rule_class
    first = run_message("median")
    assert_same_bits(first.model, run_legacy("median").model)
    assert first.model["weight"].tobytes() != initial_model()["weight"].tobytes()
    assert ServerConfig.from_run_config({"strategy": "median"}).strategy == "median"
    """


def test_a_method_is_one_file_and_one_registry_line(tmp_path: Path) -> None:
    for folder in ("strategies", "client_app", "server_app", "tests"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "strategies/rules/median.py").write_text(textwrap.dedent(RULE))
    registry = tmp_path / "strategies/rules/__init__.py"
    line = '    "fedpcd": FedPCD,\n'
    text = registry.read_text()
    assert line in text
    registry.write_text(
        text.replace(line, line + '    "median": Median,\n').replace(
            "from .fedpcd import FedPCD\n", "from .fedpcd import FedPCD\nfrom .median import Median\n"
        )
    )
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(CHECK)], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
