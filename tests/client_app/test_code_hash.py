from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from client_app.code_hash import code_hash, hash_packages

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("client_app", "server_app", "strategies")


@pytest.fixture
def copy(tmp_path: Path) -> list[Path]:
    """Copy the three packages as an app bundle would hold them: .py files without tests."""
    for package in PACKAGES:
        for source in (ROOT / package).rglob("*.py"):
            target = tmp_path / source.relative_to(ROOT)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, target)
    return [tmp_path / package for package in PACKAGES]


def test_checkout_and_bundle_have_the_same_hash(copy: list[Path]) -> None:
    assert hash_packages(copy) == code_hash()


def test_a_process_that_runs_the_copy_computes_the_same_hash(copy: list[Path]) -> None:
    program = (
        "import sys; sys.path.insert(0, sys.argv[1]); from client_app.code_hash import code_hash; print(code_hash())"
    )
    command = [sys.executable, "-c", program, str(copy[0].parent)]
    output = subprocess.run(command, check=True, capture_output=True, text=True, cwd=copy[0].parent)
    assert output.stdout.strip() == code_hash()


@pytest.mark.parametrize("name", ["test_extra.py", "extra_test.py", "__pycache__/extra.py", "notes.txt"])
def test_files_that_the_bundle_leaves_out_do_not_count(copy: list[Path], name: str) -> None:
    file = copy[0] / name
    file.parent.mkdir(exist_ok=True)
    file.write_text("x = 1\n")
    assert hash_packages(copy) == code_hash()


@pytest.mark.parametrize("package", [0, 1, 2])
def test_a_changed_file_changes_the_hash(copy: list[Path], package: int) -> None:
    file = next(copy[package].rglob("*.py"))
    file.write_text(file.read_text() + "\n")
    assert hash_packages(copy) != code_hash()


def test_a_renamed_a_new_and_a_missing_file_change_the_hash(copy: list[Path]) -> None:
    (copy[2] / "protocol.py").rename(copy[2] / "protocols.py")
    hashes = {hash_packages(copy), code_hash()}
    (copy[2] / "new.py").write_text("")
    hashes.add(hash_packages(copy))
    (copy[2] / "protocols.py").unlink()
    hashes.add(hash_packages(copy))
    assert len(hashes) == 4


def test_content_moved_from_one_file_to_the_next_changes_the_hash(tmp_path: Path) -> None:
    hashes = set()
    for number, (first, second) in enumerate((("ab", "c"), ("a", "bc"))):
        folder = tmp_path / str(number) / "package"
        folder.mkdir(parents=True)
        (folder / "a.py").write_text(first)
        (folder / "b.py").write_text(second)
        hashes.add(hash_packages([folder]))
    assert len(hashes) == 2
