"""The private SuperLink, with stand-ins for Flower's programs that fail and leave children behind."""

from __future__ import annotations

import json
import signal
import stat
import sys
import textwrap

import pytest

from cli.errors import RunError
from cli.reaper import end_marked, marked_processes
from cli.superlink import LocalSuperLink

SERVER = """
    import http.server, subprocess, sys
    subprocess.Popen(["sleep", "300"], start_new_session=True)  # as Flower's SuperExec and Ray do
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
        def log_message(self, *arguments): pass
    port = int(sys.argv[sys.argv.index("--port") + 1])
    http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""
DEAF = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"


@pytest.fixture
def programs(tmp_path, monkeypatch):
    """Replace Flower's programs by Python scripts."""
    folder = tmp_path / "programs"
    folder.mkdir()
    monkeypatch.setattr(LocalSuperLink, "_tool", lambda self, name: str(folder / name))

    def install(name, code):
        file = folder / name
        file.write_text(f"#!{sys.executable}\n" + textwrap.dedent(code))
        file.chmod(file.stat().st_mode | stat.S_IXUSR)

    return install


@pytest.mark.parametrize("prelude", ["", DEAF], ids=["obedient", "ignores SIGTERM"])
def test_leaving_the_context_ends_every_descendant_and_removes_the_folder(programs, tmp_path, prelude):
    programs("flower-superlink", prelude + textwrap.dedent(SERVER))
    with LocalSuperLink(tmp_path) as superlink:
        assert len(marked_processes(superlink.mark)) == 2
        assert (superlink.folder / "flwr" / "config.toml").is_file()
    assert marked_processes(superlink.mark) == []
    assert not superlink.folder.exists()


def test_an_interruption_cleans_up_too(programs, tmp_path):
    programs("flower-superlink", SERVER)
    superlink = LocalSuperLink(tmp_path)
    with pytest.raises(KeyboardInterrupt), superlink:
        raise KeyboardInterrupt
    assert marked_processes(superlink.mark) == []
    assert not superlink.folder.exists()


def test_a_superlink_that_dies_is_an_error_with_its_last_words(programs, tmp_path):
    programs("flower-superlink", "raise SystemExit('address in use')")
    superlink = LocalSuperLink(tmp_path)
    with pytest.raises(RunError, match="address in use"):
        superlink.__enter__()
    assert not superlink.folder.exists()


def test_a_superlink_that_never_answers_is_given_up_and_ended(programs, tmp_path):
    programs("flower-superlink", "import time; time.sleep(300)")
    superlink = LocalSuperLink(tmp_path, startup_timeout=0.5)
    with pytest.raises(RunError, match="did not start"):
        superlink.__enter__()
    assert marked_processes(superlink.mark) == []


def test_two_superlinks_share_neither_port_nor_folder(programs, tmp_path):
    programs("flower-superlink", SERVER)
    with LocalSuperLink(tmp_path) as first, LocalSuperLink(tmp_path) as second:
        assert first.port != second.port
        assert first.folder != second.folder
        second.close()
        assert marked_processes(first.mark) != []


def test_a_run_is_submitted_with_its_values_and_its_size(programs, tmp_path):
    programs("flower-superlink", SERVER)
    programs(
        "flwr",
        """
        import json, pathlib, sys
        values = open(sys.argv[sys.argv.index("--run-config") + 1]).read()
        seen = pathlib.Path(sys.argv[2], "seen.json")
        seen.write_text(json.dumps({"values": values, "words": sys.argv[1:]}))
        print("a warning first")
        print(json.dumps({"success": True, "run-id": "77"}))
        """,
    )
    with LocalSuperLink(tmp_path) as superlink:
        assert superlink.submit({"tau": 0.5}, "num-supernodes=3") == 77
    arguments = json.loads((tmp_path / "seen.json").read_text())
    assert arguments["values"] == '"tau" = 0.5\n'
    assert arguments["words"][:5] == ["run", str(tmp_path), "fedpcd", "--federation-config", "num-supernodes=3"]


def test_the_outcome_is_flowers_status_with_its_words(programs, tmp_path):
    programs("flower-superlink", SERVER)
    answer = '{"success": true, "runs": [{"status": "finished:failed", "status-details": "boom"}]}'
    programs("flwr", f"print('{answer}')")
    with LocalSuperLink(tmp_path) as superlink:
        assert superlink.outcome(77) == ("finished:failed", "boom")


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (
            """print('{"success": false, "error-message": "Invalid run configuration."}')""",
            "Invalid run conf",
        ),
        ("raise SystemExit('no connection')", "no connection"),
    ],
)
def test_a_refused_run_is_an_error_with_flowers_words(programs, tmp_path, code, words):
    programs("flower-superlink", SERVER)
    programs("flwr", code)
    with LocalSuperLink(tmp_path) as superlink, pytest.raises(RunError, match=words):
        superlink.submit({}, "num-supernodes=2")


def test_the_log_is_shown_without_colours_and_noise_where_no_terminal_reads_it(programs, tmp_path, capfd):
    programs("flower-superlink", SERVER)
    programs("flwr", r"print('\x1b[92mINFO \x1b[0m:      kept\n\x1b[92mINFO \x1b[0m:      \n  as it is')")
    with LocalSuperLink(tmp_path) as superlink:
        superlink.stream(77)
    assert capfd.readouterr().out == "INFO :      kept\n  as it is\n"


def test_a_log_that_breaks_off_is_an_error(programs, tmp_path):
    programs("flower-superlink", SERVER)
    programs("flwr", "raise SystemExit(3)")
    with LocalSuperLink(tmp_path) as superlink, pytest.raises(RunError, match="broke off with exit code 3"):
        superlink.stream(77)


def test_a_signal_during_the_cleanup_does_not_cut_it_short(programs, tmp_path, monkeypatch):
    programs("flower-superlink", SERVER)
    superlink = LocalSuperLink(tmp_path).__enter__()

    def impatient(mark):
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.raise_signal(number)
        end_marked(mark)

    monkeypatch.setattr("cli.superlink.end_marked", impatient)
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    superlink.close()
    assert marked_processes(superlink.mark) == []
    assert not superlink.folder.exists()
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)] == handlers
