"""``fedpcd federation``: the files it makes, who can read them, and what it refuses."""

from __future__ import annotations

import os
import socket
import ssl
import stat
import threading
import tomllib
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import load_ssh_private_key, load_ssh_public_key
from flwr.supercore.primitives.asymmetric import uses_nist_ec_curve
from typer.testing import CliRunner

from cli import federation, main
from cli.errors import RunError

BASIC = ("--host", "fl.example.org", "--site", "site-a", "--site", "site-b")


def command(*arguments):
    return CliRunner().invoke(main.app, ["federation", *map(str, arguments)])


@pytest.fixture
def folder(tmp_path):
    place = tmp_path / "hospitals"
    done = command("init", place, *BASIC, "--host", "10.0.0.5", "--host", "::1", "--port", 9000)
    assert done.exit_code == 0, done.output
    return place


@pytest.fixture
def registrations(monkeypatch):
    """Stand in for `flwr supernode register`; returns its calls and what it answers per site."""
    calls, answers = [], {}

    def ask(_flwr, *arguments, env):
        calls.append((arguments, tomllib.loads((Path(env["FLWR_HOME"]) / "config.toml").read_text())))
        answer = answers.get(arguments[-1], {"node-id": 77})
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(federation, "ask_flower", ask)
    return calls, answers


def files(folder):
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


def test_the_folder_holds_what_each_machine_needs_and_no_more(folder):
    site = ("ca.crt", "node.key", "node.pub")
    assert sorted(files(folder)) == sorted(
        [
            "README.txt",
            "authority/ca.key",
            "superlink/ca.crt",
            "superlink/executor.key",
            "superlink/server.key",
            "superlink/server.pem",
            *(f"sites/{name}/{file}" for name in ("site-a", "site-b") for file in site),
            "user/ca.crt",
            "user/config.toml",
        ]
    )
    assert len({(folder / place / "ca.crt").read_bytes() for place in ("superlink", "user", "sites/site-a")}) == 1
    assert tomllib.loads((folder / "user" / "config.toml").read_text())["superlink"] == {
        "fedpcd": {"address": "fl.example.org:9000", "root-certificates": str(folder / "user" / "ca.crt")}
    }


def test_secrets_are_readable_by_their_owner_alone_whatever_the_umask(tmp_path):
    old = os.umask(0)
    try:
        place = tmp_path / "f"
        assert command("init", place, *BASIC).exit_code == 0
    finally:
        os.umask(old)
    keys = [*place.rglob("*.key")]
    assert len(keys) == 5
    assert {mode(key) for key in keys} == {0o600}
    assert {mode(path) for path in [place, *place.rglob("*")] if path.is_dir()} == {0o700}


def test_node_keys_are_what_flower_reads(folder):
    private = load_ssh_private_key((folder / "sites/site-a/node.key").read_bytes(), None)
    public = load_ssh_public_key((folder / "sites/site-a/node.pub").read_bytes())
    assert private.public_key() == public
    assert public.curve.name == "secp384r1"
    assert uses_nist_ec_curve(public)
    assert (folder / "sites/site-a/node.pub").read_text().endswith(" site-a\n")
    assert (folder / "sites/site-a/node.key").read_bytes() != (folder / "sites/site-b/node.key").read_bytes()


def handshake(folder, host, authority=None):
    """Connect with Python's strictest checks; raises ssl.SSLError if the client refuses the server."""
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(folder / "superlink" / "server.pem", folder / "superlink" / "server.key")
    client = ssl.create_default_context(cafile=authority or folder / "user" / "ca.crt")
    client.verify_flags |= ssl.VERIFY_X509_STRICT
    ours, theirs = socket.socketpair()

    def serve():
        try:
            server.wrap_socket(theirs, server_side=True).close()
        except OSError:
            theirs.close()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        client.wrap_socket(ours, server_hostname=host).close()
    finally:
        ours.close()
        thread.join()


@pytest.mark.parametrize("host", ["fl.example.org", "10.0.0.5", "::1", "localhost", "127.0.0.1"])
def test_strict_clients_accept_the_superlink_under_all_its_names(folder, host):
    handshake(folder, host)


def test_other_names_and_other_authorities_are_refused(folder, tmp_path):
    assert command("init", tmp_path / "other", *BASIC).exit_code == 0
    with pytest.raises(ssl.SSLCertVerificationError, match="Hostname mismatch"):
        handshake(folder, "evil.example.org")
    with pytest.raises(ssl.SSLCertVerificationError, match=r"signature failure|self-signed|unable to get"):
        handshake(folder, "fl.example.org", tmp_path / "other" / "user" / "ca.crt")


def test_certificates_say_what_they_are_for_and_how_long(folder):
    authority = x509.load_pem_x509_certificate((folder / "superlink" / "ca.crt").read_bytes())
    server = x509.load_pem_x509_certificate((folder / "superlink" / "server.pem").read_bytes())
    assert (authority.not_valid_after_utc - authority.not_valid_before_utc).days == 3650
    assert (server.not_valid_after_utc - server.not_valid_before_utc).days == 825
    assert authority.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    assert not server.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    usage = server.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert list(usage) == [x509.oid.ExtendedKeyUsageOID.SERVER_AUTH]


def test_nothing_that_exists_is_overwritten(folder):
    before = files(folder)
    for arguments in (("init", folder, *BASIC), ("add-site", folder, "site-c", "site-a")):
        done = command(*arguments)
        assert done.exit_code == 2
        assert "exists already" in done.output
        assert files(folder) == before  # not even site-c was begun
    assert f"fedpcd federation add-site {folder} NAME" in command("init", folder, *BASIC).output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--host", "fl.example.org:8000", "--site", "a"), "'fl.example.org:8000': give a DNS name or an IP address"),
        (("--host", "0.0.0.0", "--site", "a"), "--host 0.0.0.0: sites cannot connect to that"),
        (("--host", "10.0.0.300", "--site", "a"), "'10.0.0.300' is neither an IP address nor a DNS name"),
        (("--host", "klinik-köln.de", "--site", "a"), "in their ASCII form"),
        (("--host", "h", "--site", "../a"), "site '../a': use up to 63 letters"),
        (("--host", "h", "--site", "a", "--site", "a"), "site 'a' is given twice"),
        (("--host", "h", "--site", "a", "--days", "4000"), "--days 4000: 4000 days are too many"),
    ],
)
def test_wrong_input_is_named_and_leaves_nothing(tmp_path, arguments, words):
    done = command("init", tmp_path / "f", *arguments)
    assert done.exit_code == 2
    assert words in done.output
    assert not (tmp_path / "f").exists()


def test_an_empty_folder_can_be_used_and_a_file_cannot(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    assert command("init", tmp_path / "empty", *BASIC).exit_code == 0
    assert command("init", tmp_path / "file", *BASIC).exit_code == 2


def test_add_site_makes_one_more_key_and_changes_no_other_file(folder):
    before = files(folder)
    done = command("add-site", folder, "site-c")
    assert done.exit_code == 0
    assert f"fedpcd federation register {folder} --site site-c" in done.output
    after = files(folder)
    assert set(after) - set(before) == {f"sites/site-c/{name}" for name in ("ca.crt", "node.key", "node.pub")}
    assert before.items() <= after.items()


def test_register_tells_every_site_and_whether_it_was_known(folder, registrations):
    calls, answers = registrations
    answers["site-b"] = RunError("Using SuperLink: fedpcd\n\nPublic key already in use.")
    done = command("register", folder)
    assert done.exit_code == 0
    assert done.output.splitlines() == ["site-a: registered, node 77", "site-b: already registered"]
    arguments, config = calls[0]
    assert arguments == (
        *("supernode", "register", str(folder / "sites/site-a/node.pub"), "fedpcd", "--name", "site-a"),
    )
    assert config["superlink"]["fedpcd"]["address"] == "fl.example.org:9000"


def test_register_works_in_a_moved_folder_for_one_site_and_at_another_address(folder, registrations):
    moved = folder.rename(folder.with_name("moved"))
    assert command("register", moved, "--site", "site-b", "--address", "localhost:9000").exit_code == 0
    [(arguments, config)] = registrations[0]
    assert arguments[-1] == "site-b"
    assert config["superlink"]["fedpcd"] == {
        "address": "localhost:9000",
        "root-certificates": str(moved / "user" / "ca.crt"),
    }


def test_register_names_what_is_missing_or_out_of_reach(folder, registrations, tmp_path):
    done = command("register", folder, "--site", "site-x")
    assert (done.exit_code, f"fedpcd federation add-site {folder} site-x" in done.output) == (2, True)
    assert command("register", tmp_path).exit_code == 2
    registrations[1]["site-a"] = RunError("Using SuperLink: fedpcd\n\nConnection to the SuperLink is unavailable.")
    done = command("register", folder)
    assert done.exit_code == 1
    assert "site 'site-a' at fl.example.org:9000: Connection to the SuperLink is unavailable." in done.output


def test_connect_appends_to_the_users_configuration_once(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("FLWR_HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    file = tmp_path / "home" / "config.toml"
    mine = '# mine\n[superlink]\ndefault = "x"\n\n[superlink.x]\naddress = "h:1"'
    file.write_text(mine)
    file.chmod(0o600)
    assert command("connect", folder).exit_code == 0
    text = file.read_text()
    assert text.startswith(mine)
    assert tomllib.loads(text)["superlink"]["fedpcd"]["root-certificates"] == str(folder / "user" / "ca.crt")
    assert mode(file) == 0o600
    assert "already" in command("connect", folder / "user").output
    assert file.read_text() == text
    assert [path.name for path in file.parent.iterdir()] == ["config.toml"]


def test_connect_leaves_another_connection_of_that_name_alone(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("FLWR_HOME", str(tmp_path / "home"))
    other = tmp_path / "other"
    assert command("init", other, *BASIC).exit_code == 0
    assert command("connect", folder).exit_code == 0  # a new user: Flower's own defaults come first
    before = (tmp_path / "home" / "config.toml").read_text()
    assert tomllib.loads(before)["superlink"]["default"] == "local"
    done = command("connect", other)
    assert done.exit_code == 2
    assert "has another [superlink.fedpcd]" in done.output
    assert (tmp_path / "home" / "config.toml").read_text() == before
    assert command("connect", other, "--name", "second").exit_code == 0
    assert set(tomllib.loads((tmp_path / "home" / "config.toml").read_text())["superlink"]) > {"fedpcd", "second"}


def test_renew_keeps_the_names_adds_one_and_keeps_the_old_files(folder):
    before = files(folder)
    assert command("renew", folder, "--host", "10.0.0.6", "--days", 30).exit_code == 0
    for host in ("fl.example.org", "10.0.0.5", "10.0.0.6", "localhost", "superlink"):
        handshake(folder, host)
    old = [content for name, content in files(folder).items() if ".until-" in name]
    assert sorted(old) == sorted(before[f"superlink/server.{kind}"] for kind in ("pem", "key"))
    assert mode(folder / "superlink" / "server.key") == 0o600
    (folder / "authority" / "ca.key").unlink()
    assert "certificates are made where" in command("renew", folder).output


@pytest.mark.parametrize("step", range(1, 7))
def test_an_interrupted_renewal_leaves_a_certificate_and_can_be_repeated(folder, monkeypatch, step):
    steps = 0

    def failing(original):
        def act(*arguments, **keywords):
            nonlocal steps
            steps += 1
            if steps == step:
                raise OSError(28, "No space left on device")
            return original(*arguments, **keywords)

        return act

    with monkeypatch.context() as disk:
        disk.setattr("cli.federation._write", failing(federation._write))
        disk.setattr(Path, "hardlink_to", failing(Path.hardlink_to))
        disk.setattr(Path, "replace", failing(Path.replace))
        assert command("renew", folder).exit_code == 1
    assert {"server.pem", "server.key"} <= {path.name for path in (folder / "superlink").iterdir()}
    assert command("renew", folder).exit_code == 0
    handshake(folder, "localhost")
    assert [path.name for path in (folder / "superlink").iterdir() if path.name.startswith(".")] == []
