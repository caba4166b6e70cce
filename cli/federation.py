"""The commands ``fedpcd federation ...``: the certificates and node keys of a federation of several machines."""

from __future__ import annotations

import contextlib
import io
import ipaddress
import json
import os
import re
import secrets
import shutil
import sysconfig
import tempfile
import time
import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from . import credentials
from .app_folder import INSTALL
from .errors import RunError, UsageError
from .reporting import reported_errors
from .superlink import CONNECTION, ask_flower

app = typer.Typer(no_args_is_help=True, help="Set up a federation of several machines: TLS and SuperNode keys.")

Folder = Annotated[Path, typer.Argument(metavar="FOLDER", help="The federation's folder.", show_default=False)]
Sites = Annotated[list[str], typer.Argument(metavar="SITE...", help="Names of the new sites.", show_default=False)]
Hosts = Annotated[
    list[str],
    typer.Option(
        "--host",
        metavar="NAME|IP",
        help="Name or address of the SuperLink's machine as sites type it; repeatable, the first is the usual one.",
        show_default=False,
    ),
]
Days = Annotated[int, typer.Option(min=1, help="Validity of the SuperLink's certificate.")]

# The SuperLink's own machine (registering there, health checks, port forwarding), and its name among containers.
_ALWAYS = ("localhost", "127.0.0.1", "superlink")
_DAYS = 825
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_LABEL = re.compile(r"(?!-)[A-Za-z0-9_-]{1,63}(?<!-)")


@app.command()
def init(
    folder: Folder,
    host: Hosts,
    site: Annotated[
        list[str],
        typer.Option(
            "--site", metavar="NAME", help="A site's name, its client-id too; repeatable.", show_default=False
        ),
    ],
    port: Annotated[int, typer.Option(min=1, max=65535, help="The SuperLink's port.")] = 8000,
    days: Days = _DAYS,
) -> None:
    """Make a new federation's folder: certificates, one key per site, and the user's connection.

    For example:

      fedpcd federation init hospitals --host fl.example.org --host 10.0.0.5 --site site-a --site site-b

    FOLDER/README.txt then says what to copy where, and which command each machine runs. Nothing is overwritten.
    """
    with reported_errors("making the federation"):
        hosts = list(dict.fromkeys(_host(name) for name in host))
        sites = _new_names(site)
        folder = folder.expanduser().resolve()
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise UsageError(
                f"{folder} exists already: choose another folder, or give this federation one more site by "
                f"`fedpcd federation add-site {folder} NAME`"
            )
        authority_key, authority = credentials.new_authority()
        server_key, server = _server_certificate(authority_key, authority, hosts, days)
        address = _address(hosts[0], port)
        _write(folder / "authority" / "ca.key", authority_key, secret=True)
        _write(folder / "superlink" / "ca.crt", authority)
        _write(folder / "superlink" / "server.pem", server)
        _write(folder / "superlink" / "server.key", server_key, secret=True)
        _write(folder / "superlink" / "executor.key", secrets.token_bytes(32), secret=True)
        _write(folder / "user" / "ca.crt", authority)
        _write(folder / "user" / "config.toml", _connection(CONNECTION, address, folder / "user" / "ca.crt").encode())
        for name in sites:
            _make_site(folder, name)
        _write(folder / "README.txt", _guide(address, port, sites[0], days).encode())
        print(f"{folder}: a federation at {address} with {len(sites)} site(s): {', '.join(sites)}")
        print(f"next: read {folder / 'README.txt'}")


@app.command()
def add_site(folder: Folder, sites: Sites) -> None:
    """Make the key of one more site, or of several.

    For example:

      fedpcd federation add-site hospitals site-c
    """
    with reported_errors("adding the site"):
        folder = _existing(folder)
        names = _new_names(sites)
        for name in names:
            _absent(folder / "sites" / name)
        for name in names:
            _make_site(folder, name)
            print(f"{name}: copy {folder / 'sites' / name} to its machine")
        options = " ".join(f"--site {name}" for name in names)
        print(f"next: fedpcd federation register {folder} {options}")


@app.command()
def register(
    folder: Folder,
    site: Annotated[
        list[str] | None,
        typer.Option("--site", metavar="NAME", help="Only this site; repeatable.", show_default="all"),
    ] = None,
    address: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="Where the SuperLink is reached from here.", show_default="as in init"),
    ] = None,
) -> None:
    """Tell the running SuperLink the sites' public keys; a site without this is refused.

    For example:

      fedpcd federation register hospitals

      fedpcd federation register hospitals --address localhost:8000

    Registering again does no harm. A SuperLink that lost its state (started without --database) needs it again.
    """
    with reported_errors("the registration"):
        folder = _existing(folder)
        names = site or sorted(file.parent.name for file in folder.glob("sites/*/node.pub"))
        keys = {name: folder / "sites" / name / "node.pub" for name in names}
        for name, file in keys.items():
            if not file.is_file():
                raise UsageError(
                    f"site {name!r} has no key {file}: make it by `fedpcd federation add-site {folder} {name}`"
                )
        place = address or _address_in(folder / "user" / "config.toml")
        with tempfile.TemporaryDirectory(prefix="fedpcd-") as home:  # Flower writes into its home, which is the user's
            (Path(home) / "config.toml").write_text(_connection(CONNECTION, place, folder / "user" / "ca.crt"))
            for name, file in keys.items():
                print(f"{name}: {_register(file, name, place, home)}", flush=True)


@app.command()
def connect(
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="The federation's folder, or a copy of its user folder.")
    ],
    name: Annotated[str, typer.Option(help="Name of the connection, if several federations are used.")] = CONNECTION,
) -> None:
    """Add the federation to your own Flower configuration, so that `flwr run . fedpcd` reaches it.

    For example:

      fedpcd federation connect hospitals/user

    The section [superlink.fedpcd] is appended to ~/.flwr/config.toml ($FLWR_HOME); the rest of the file stays as it is.
    """
    with reported_errors("adding the connection"):
        folder = folder.expanduser().resolve()
        source = folder if (folder / "config.toml").is_file() else folder / "user"
        if not _NAME.fullmatch(name) or "." in name:
            raise UsageError(f"--name {name!r}: use letters, digits, - and _")
        section = _connection(name, _address_in(source / "config.toml"), source / "ca.crt")
        wanted = tomllib.loads(section)["superlink"][name]
        file = _flower_configuration()
        text = file.read_text(encoding="utf-8")
        known = _parsed(text, file).get("superlink", {}).get(name)
        if known == wanted:
            print(f"{file} has [superlink.{name}] already")
        elif known is not None:
            raise UsageError(
                f"{file} has another [superlink.{name}]: remove that section, or choose a name of your own, e.g. "
                f"`fedpcd federation connect {folder} --name {name}-2`"
            )
        else:
            text = text.rstrip("\n") + "\n\n" + section
            _parsed(text, file)  # a file that ends within a table of its own is not spoilt
            _replace(file, text)
            print(f"{file}: added [superlink.{name}]; now `flwr run . {name}` starts a run there")


@app.command()
def renew(
    folder: Folder,
    host: Annotated[
        list[str] | None,
        typer.Option(
            "--host", metavar="NAME|IP", help="A further name of the SuperLink's machine.", show_default=False
        ),
    ] = None,
    days: Days = _DAYS,
) -> None:
    """Make a new certificate for the SuperLink: the old one ends, or its machine got another name.

    For example:

      fedpcd federation renew hospitals --host 10.0.0.6

    Sites and users keep their ca.crt. The old files stay beside the new ones.
    """
    with reported_errors("renewing the certificate"):
        folder = _existing(folder)
        place, key = folder / "superlink", folder / "authority" / "ca.key"
        if not key.is_file():
            raise UsageError(f"there is no {key}: certificates are made where `fedpcd federation init` was typed")
        more = [_host(name) for name in host or []]
        hosts = list(dict.fromkeys([*credentials.hosts_of((place / "server.pem").read_bytes()), *more]))
        server_key, server = _server_certificate(key.read_bytes(), (place / "ca.crt").read_bytes(), hosts, days)
        until = time.strftime("until-%Y%m%dT%H%M%SZ", time.gmtime())
        new = {"server.pem": server, "server.key": server_key}
        for name, content in new.items():
            (place / f".new-{name}").unlink(missing_ok=True)  # of a renewal that was interrupted
            _write(place / f".new-{name}", content, secret=name == "server.key")
        # Both new files are complete: at no moment from here on is one of the names without a file.
        for name in new:
            with contextlib.suppress(
                FileExistsError
            ):  # a renewal within the same second, of which this is the older file
                (place / f"{name}.{until}").hardlink_to(place / name)  # a copy would show the key for a moment
        for name in new:
            (place / f".new-{name}").replace(place / name)
        print(f"{place}: a new server.pem and server.key for {', '.join(hosts)}, valid for {days} days")
        print("next: copy both to the SuperLink's machine and start the SuperLink again")


def _make_site(folder: Path, name: str) -> None:
    place = folder / "sites" / name
    private, public = credentials.new_node_key(name)
    _write(place / "ca.crt", (folder / "user" / "ca.crt").read_bytes())
    _write(place / "node.key", private, secret=True)
    _write(place / "node.pub", public)


def _server_certificate(key: bytes, certificate: bytes, hosts: Sequence[str], days: int) -> tuple[bytes, bytes]:
    try:
        return credentials.new_server_certificate(key, certificate, list(dict.fromkeys([*hosts, *_ALWAYS])), days)
    except ValueError as error:
        raise UsageError(f"--days {days}: {error}") from error


def _register(public_key: Path, name: str, address: str, home: str) -> str:
    scripts = os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", "")])
    flwr = shutil.which("flwr", path=scripts)
    if flwr is None:
        raise UsageError(f"the command flwr is not installed: {INSTALL}")
    env = {**os.environ, "FLWR_HOME": home, "FLWR_DISABLE_UPDATE_CHECK": "1", "FLWR_TELEMETRY_ENABLED": "0"}
    try:
        answer = ask_flower(flwr, "supernode", "register", str(public_key), CONNECTION, "--name", name, env=env)
    except RunError as error:
        if "already in use" in str(error):
            return "already registered"
        words = str(error).rpartition("\n\n")[2]  # without the line that names the connection
        raise RunError(
            f"site {name!r} at {address}: {words}\nIs the SuperLink running there, with "
            "--enable-supernode-auth and the server.pem of this folder, and reached from this machine under that name?"
        ) from error
    return f"registered, node {answer['node-id']}"


def _existing(folder: Path) -> Path:
    folder = folder.expanduser().resolve()
    if not (folder / "user" / "ca.crt").is_file():
        raise UsageError(f"{folder} is no federation's folder: make one by `fedpcd federation init {folder} --help`")
    return folder


def _host(name: str) -> str:
    """Check a name or an address of the SuperLink's machine."""
    try:
        address = ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        if len(name) > 253 or not all(_LABEL.fullmatch(label) for label in name.split(".")):
            raise UsageError(
                f"--host {name!r}: give a DNS name or an IP address alone, the port by --port; names with other "
                "letters in their ASCII form (xn--...)"
            ) from None
        if name.replace(".", "").isdecimal():
            raise UsageError(f"--host {name!r} is neither an IP address nor a DNS name") from None
        return name.lower()
    if address.is_unspecified:
        raise UsageError(
            f"--host {name}: sites cannot connect to that; give the address under which they reach the machine"
        )
    return str(address)


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _new_names(names: Iterable[str]) -> list[str]:
    """Check the names of sites: they become folders, client ids and words of commands."""
    found = list(names)
    for name in found:
        if not _NAME.fullmatch(name):
            raise UsageError(
                f"site {name!r}: use up to 63 letters, digits, . - and _, beginning with a letter or digit"
            )
        if found.count(name) > 1:
            raise UsageError(f"site {name!r} is given twice: every site needs a name of its own")
    return found


def _connection(name: str, address: str, certificate: Path) -> str:
    """The section of a Flower configuration; JSON writes strings as TOML reads them."""
    path = json.dumps(str(certificate), ensure_ascii=False)
    return f"[superlink.{name}]\naddress = {json.dumps(address)}\nroot-certificates = {path}\n"


def _address_in(file: Path) -> str:
    if not file.is_file():
        raise UsageError(f"there is no {file}: it comes from `fedpcd federation init`")
    try:
        return str(_parsed(file.read_text(encoding="utf-8"), file)["superlink"][CONNECTION]["address"])
    except KeyError as error:
        raise UsageError(f"{file} lacks {error}: it needs [superlink.{CONNECTION}] with an address") from None


def _parsed(text: str, file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"cannot read {file}: {error}") from error


def _flower_configuration() -> Path:
    """The user's Flower configuration, made with Flower's own defaults if there is none yet."""
    from flwr.cli.flower_config import init_flwr_config  # takes a second; only this command needs Flower itself
    from flwr.supercore.utils import get_flwr_home

    with contextlib.redirect_stdout(io.StringIO()):
        init_flwr_config()
    return (get_flwr_home() / "config.toml").resolve()


def _replace(file: Path, text: str) -> None:
    """Change a file as a whole, with its permissions."""
    with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=file.parent, delete=False) as new:
        new.write(text)
    shutil.copymode(file, new.name)
    Path(new.name).replace(file)


def _absent(path: Path) -> None:
    if path.exists():
        raise UsageError(
            f"{path} exists already and is not overwritten: choose another name, or remove it if no machine uses it"
        )


def _write(file: Path, content: bytes, *, secret: bool = False) -> None:
    """Write a new file, in folders that only the user can enter; a secret one is never readable by others."""
    missing = [folder for folder in (file.parent, *file.parent.parents) if not folder.exists()]
    for folder in reversed(missing):
        folder.mkdir(mode=0o700)
    try:
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 if secret else 0o644)
    except FileExistsError:
        _absent(file)
        raise
    with os.fdopen(descriptor, "wb") as sink:
        sink.write(content)


def _guide(address: str, port: int, site: str, days: int) -> str:
    return f"""The federation at {address}
{"=" * (18 + len(address))}

authority/ca.key signs the SuperLink's certificates. It stays here, is copied to no machine, and belongs into a backup.
Copy the other folders over an encrypted channel (scp -pr, rsync -a), each to the one machine that it is for: *.key are
secrets. Every machine needs the app: pip install '.[app]'

1. The SuperLink's machine gets the folder superlink/. There, in that folder, two processes:

     flower-superlink --host 0.0.0.0 --port {port} --database superlink.db --enable-supernode-auth \\
       --ssl-ca-certfile ca.crt --ssl-certfile server.pem --ssl-keyfile server.key \\
       --isolation process --superexec-auth-secret-file executor.key --disable-runtime-dependency-installation
     flower-superexec --runtime-api-address localhost:{port} --root-certificates ca.crt \\
       --superexec-auth-secret-file executor.key

   The second runs the server's half of the app; executor.key keeps others from fetching that work. --database keeps
   nodes and runs when the SuperLink is started again. Results of runs are written on this machine. Let only sites and
   operators reach the port: Flower 1.42 does not ask users who they are, and whoever reaches it can start runs.

2. Here (or wherever this whole folder is), once the SuperLink runs, and again after each add-site:

     fedpcd federation register .

3. Each site NAME gets the folder sites/NAME/. There, in that folder, e.g. for {site}:

     flower-supernode --superlink {address} --root-certificates ca.crt --auth-supernode-private-key node.key \\
       --node-config "client-id='{site}' data-root='/path/to/data'"

4. Whoever starts runs gets the folder user/. There, once:

     fedpcd federation connect .

   and then, in the folder of the app:

     flwr run . {CONNECTION} --stream --run-config \\
       "dataset='image-folder' image-classes='benign,malignant' fraction-train=1.0 min-nodes=2"

   with the classes of the sites' images, and min-nodes above half of the sites. docs/data.md: how images must lie.

One more site: `fedpcd federation add-site . NAME`, then steps 2 and 3.
A site that keeps its private key to itself makes it by `ssh-keygen -t ecdsa -b 384 -N '' -f node.key` and sends only
node.key.pub, which is put here as sites/NAME/node.pub before step 2.
A site that leaves: `flwr supernode ls {CONNECTION}` and `flwr supernode unregister NODE-ID {CONNECTION}`. Its key
cannot be registered again: should it return, remove sites/NAME here and make a new key by add-site.
server.pem is valid for {days} days: `fedpcd federation renew .` makes the next one, for more names of the machine too.
"""
