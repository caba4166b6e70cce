"""A registered site whose replies are damaged on purpose, in a federation of real processes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.end_to_end.federation import Federation, in_process, lines_of
from tests.end_to_end.test_engines_agree import model_of
from tests.support import assert_same_bits

pytestmark = pytest.mark.slow

HOSTILE = "site-x"
SITES = {"site-a": 3, "site-b": 17, HOSTILE: 29}
SETTINGS = {"num-server-rounds": 2, "fraction-train": 1.0, "tau": 0.5, "min-nodes": 3}
DAMAGE = r"""
from flwr.app import MetricRecord

body = b"\n\x03\n\x01a"  # an entry without a value
MetricRecord.deflate = lambda self: b"MetricRecord  %d\x00" % len(body) + body
"""
"""What Python runs at the start of each of the site's processes: its app is the others', with the same code hash."""


class WithHostileSite(Federation):
    """A federation of which one site alters the bytes that it sends."""

    def node_environment(self, client_id: str) -> Mapping[str, str]:
        """Variables of a site's processes."""
        if client_id != HOSTILE:
            return {}
        place = self.folder / "hostile"
        place.mkdir(exist_ok=True)
        (place / "sitecustomize.py").write_text(DAMAGE)
        return {"PYTHONPATH": str(place)}


@pytest.mark.timeout(1000)
def test_replies_that_flower_cannot_decode_cost_their_site_the_round_and_change_no_bit(tmp_path: Path) -> None:
    with WithHostileSite(SITES, secure=False) as federation:
        run_id = federation.submit({**SETTINGS, "results-dir": str(tmp_path), "run-name": "run"})
        assert federation.finish(run_id, 700) == "finished:completed", federation.outcome(run_id)
    folder = tmp_path / "run" / "fedpcd"
    rejections = lines_of(folder / "rejections.jsonl")
    assert {(line["client_id"], line["kind"]) for line in rejections} == {(HOSTILE, "error")}
    assert [line["round"] for line in rejections if line["phase"] == "train"] == [1, 2]
    assert [line["round"] for line in rejections if line["phase"] == "evaluate"] == [0, 1, 2]
    assert all("its reply cannot be read: AttributeError" in line["reason"] for line in rejections)
    assert [line["accepted"] for line in lines_of(folder / "rounds.jsonl")][1:] == [["site-a", "site-b"]] * 2
    honest = {site: part for site, part in SITES.items() if site != HOSTILE}
    assert_same_bits(model_of(folder), in_process(tmp_path, honest, {**SETTINGS, "min-nodes": 2}))
