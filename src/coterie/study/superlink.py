"""Studies on Flower: certificates and node keys, the coordinator's SuperLink behind its door, a site's SuperNode, jobs.

Certificates and keys are made with the package `cryptography`, which Flower brings. A job is an app of Flower's whose
server's side is coterie's (`flower_app`); sites run no app (`supernode`).
"""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import httpx
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
from flwr.cli.build import build_fab_from_disk
from flwr.common.constant import HEARTBEAT_PATIENCE
from flwr.common.serde import fab_to_proto
from flwr.proto.control_pb2 import (
    ListNodesRequest,
    ListRunsRequest,
    RegisterNodeRequest,
    StartRunRequest,
    StopRunRequest,
)
from flwr.supercore.control import ControlHttpClient
from flwr.supercore.fab import Fab
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
from flwr.supercore.primitives.asymmetric import public_key_to_bytes

from coterie.engines.flower.deployment import OFFLINE
from coterie.engines.flower.launch import write_app
from coterie.engines.lifetime import free_ports, with_variable
from coterie.errors import RunError, UsageError
from coterie.problems.sites.folder import Study
from coterie.study.invitation import write_private

FOLDER, ABOUT = "superlink", "about.json"
VALID_DAYS = 365
BESIDE_PROXY = ("NO_PROXY", "127.0.0.1")  # what is on loopback is not asked for at a proxy
START = 300.0  # seconds that the SuperLink may take to listen
REFUSED, TWICE = "refused before it was connected", "runs already"  # what a SuperNode says at its end


def provision(study: Study) -> None:
    """Make an authority, the SuperLink's certificate and one key per site; those that exist stay.

    Args:
        study: the study with all sites that are invited.
    """
    folder = study.folder / FOLDER
    if not (folder / "ca.key").is_file():
        authority, root = _authority(study.name)
        key = ec.generate_private_key(ec.SECP384R1())
        certificate = _certificate(study.host, key, authority, root)
        write_private(
            folder,
            {
                "ca.key": _private(authority),
                "rootCA.pem": root.public_bytes(serialization.Encoding.PEM),
                "server.key": _private(key),
                "server.crt": certificate.public_bytes(serialization.Encoding.PEM),
            },
        )
    for site in study.sites:
        if not (folder / "sites" / site).is_file():
            write_private(folder / "sites", _node_keys(site))


def renew(study: Study, site: str) -> None:
    """Forget a site's key, so that `provision` makes another one; nothing is sent to the node of the old key any more.

    Args:
        study: the study.
        site: a site that is invited again.
    """
    folder = study.folder / FOLDER
    for name in (site, f"{site}.pub"):
        (folder / "sites" / name).unlink(missing_ok=True)
    if (folder / ABOUT).is_file():
        about = json.loads((folder / ABOUT).read_text(encoding="utf-8"))
        about["nodes"].pop(site, None)
        write_private(folder, {ABOUT: json.dumps(about).encode()})


def _node_keys(site: str) -> dict[str, bytes]:
    key = ec.generate_private_key(ec.SECP384R1())
    encoding, form = serialization.Encoding, serialization.PrivateFormat.OpenSSH
    private = key.private_bytes(encoding.PEM, form, serialization.NoEncryption())
    public = key.public_key().public_bytes(encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    return {site: private, f"{site}.pub": public + b"\n"}


def _private(key: Any) -> bytes:
    form = serialization.PrivateFormat.PKCS8
    return key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())


def _builder(subject: str, issuer: str, key: Any) -> x509.CertificateBuilder:
    names = [x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]) for name in (subject, issuer)]
    now = datetime.now(UTC)
    builder = x509.CertificateBuilder(names[1], names[0], key.public_key(), x509.random_serial_number())
    return builder.not_valid_before(now - timedelta(minutes=5)).not_valid_after(now + timedelta(days=VALID_DAYS))


def _authority(name: str) -> tuple[Any, x509.Certificate]:
    key = ec.generate_private_key(ec.SECP384R1())
    builder = _builder(f"study {name}", f"study {name}", key)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    usage = x509.KeyUsage(False, False, False, False, False, True, True, False, False)
    builder = builder.add_extension(usage, critical=True)
    identifier = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    return key, builder.add_extension(identifier, critical=False).sign(key, hashes.SHA384())


def _certificate(host: str, key: Any, authority: Any, root: x509.Certificate) -> x509.Certificate:
    issuer = root.subject.get_attributes_for_oid(NameOID.COMMON_NAME)[0].value
    builder = _builder(host, str(issuer), key)
    names: list[x509.GeneralName] = [x509.DNSName("localhost"), x509.IPAddress(ip_address("127.0.0.1"))]
    try:
        names.append(x509.IPAddress(ip_address(host)))
    except ValueError:
        names.append(x509.DNSName(host))
    builder = builder.add_extension(x509.SubjectAlternativeName(list(dict.fromkeys(names))), critical=False)
    builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    builder = builder.add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
    own = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.public_key())
    return builder.add_extension(own, critical=False).sign(authority, hashes.SHA384())


def kit_of(study: Study, site: str) -> dict[str, bytes]:
    """What a site needs: its key, and the certificate of the authority."""
    folder = study.folder / FOLDER
    return {"node.key": (folder / "sites" / site).read_bytes(), "rootCA.pem": (folder / "rootCA.pem").read_bytes()}


def install_kit(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write a site's kit into its folder."""
    write_private(folder, dict(files))


def prepare_server(study: Study) -> None:
    """Nothing: the server's own process begins with it."""


def prepare_site(folder: Path) -> None:
    """Nothing beside the kit."""


def server_environment(study: Study) -> dict[str, str]:
    """What Flower's processes need at the coordinator."""
    return {**_environment(study.folder / FOLDER / "flwr"), **dict([BESIDE_PROXY])}


def site_environment(folder: Path) -> dict[str, str]:
    """What Flower's processes need at a site."""
    return _environment(folder / "flwr")


def _environment(home: Path) -> dict[str, str]:
    here = str(Path(sys.executable).parent)
    path = os.pathsep.join([here, os.environ.get("PATH", "")])
    threads = os.environ.get("OMP_NUM_THREADS", "1")
    return {**OFFLINE, "FLWR_HOME": str(home), "PATH": path, "OMP_NUM_THREADS": threads}


def server_command(study: Study) -> list[str]:
    """What runs the SuperLink and its door."""
    return [sys.executable, "-u", "-P", "-m", "coterie.study.superlink", str(study.folder)]


def client_command(folder: Path, site: str, address: str) -> list[str]:
    """What runs a site's SuperNode, in the folder of its kit."""
    return [sys.executable, "-u", "-P", "-m", "coterie.study.supernode", str(folder), address]


def _program(name: str) -> str:
    path = Path(sys.executable).parent / name
    return str(path) if path.exists() else name


def explain(text: str) -> str | None:
    """What is wrong where a SuperNode ends, from the end of its log; None where it should be started again."""
    low = text.lower()
    if "certificate has expired" in low:
        return "a certificate has expired; ask the coordinator for another invitation."
    if "certificate_verify_failed" in low or "certificate verify failed" in low:
        return "the coordinator's certificate does not fit this invitation; ask for another one."
    if "failed to activate supernode" in low:
        return (
            "the coordinator does not admit this site. Either another site is connected with this invitation, or was "
            "within the last minute: each invitation is for one site. Or the coordinator does not know its key: ask "
            "for another invitation."
        )
    if REFUSED in text:
        return (
            "the coordinator does not accept what this site has signed; set the clocks of both machines by NTP, or "
            "ask for another invitation."
        )
    if TWICE in text:
        return "this site is running already on this machine."
    return None


def link(study: Study) -> "FlowerLink":
    """The coordinator's connection to its own SuperLink."""
    return FlowerLink(study)


class FlowerLink:
    """The coordinator's connection to its own SuperLink, on loopback; the calls are those of Flower's command line."""

    def __init__(self, study: Study) -> None:
        self.study, self.folder = study, study.folder / FOLDER

    def submit(self, job: dict[str, Any], told: dict[str, Any], answer: Path) -> str:
        """Start a job; its number."""
        nodes = json.dumps(self._about()["nodes"])
        settings = {"task": json.dumps(job), "job": json.dumps(told), "answer": str(answer), "nodes": nodes}
        app = write_app(answer.parent / "app", sides="coterie.study.flower_app", **settings)
        content = build_fab_from_disk(app)
        fab = Fab(sha256(content).hexdigest(), content, {})
        return str(self._ask("StartRun", StartRunRequest(fab=fab_to_proto(fab))).run_id)

    def status(self, number: str) -> str:
        """How a job is doing."""
        runs = self._ask("ListRuns", ListRunsRequest(run_id=int(number))).run_dict
        found = runs[int(number)].status
        return f"{found.status}:{found.sub_status}"

    def stop(self, number: str) -> None:
        """End a job."""
        self._ask("StopRun", StopRunRequest(run_id=int(number)))

    def connected(self) -> dict[str, str]:
        """The sites that are online now, each with when it was last seen."""
        known = {node: site for site, node in self._about()["nodes"].items()}
        found = self._ask("ListNodes", ListNodesRequest()).nodes_info
        return {
            known[node.node_id]: str(node.online_until - HEARTBEAT_PATIENCE * node.heartbeat_interval)
            for node in found
            if node.status == "online" and node.node_id in known
        }

    def register(self, address: str) -> None:
        """Make the keys of all sites known to the SuperLink at an address, and remember both."""
        write_private(self.folder, {ABOUT: json.dumps({"address": address, "nodes": {}}).encode()})
        nodes = {}
        for site in self.study.sites:
            key: Any = serialization.load_ssh_public_key((self.folder / "sites" / f"{site}.pub").read_bytes())
            nodes[site] = self._ask("RegisterNode", RegisterNodeRequest(public_key=public_key_to_bytes(key))).node_id
        write_private(self.folder, {ABOUT: json.dumps({"address": address, "nodes": nodes}).encode()})

    def _about(self) -> dict[str, Any]:
        try:
            about: dict[str, Any] = json.loads((self.folder / ABOUT).read_text(encoding="utf-8"))
            return about
        except (OSError, ValueError):
            raise RunError(
                f"the SuperLink is not up; start it with: coterie study serve {self.study.folder}."
            ) from None

    def _ask(self, call: str, request: Any) -> Any:
        """The answer to a call of Flower's control interface."""
        about = self._about()
        authority = (self.folder / "rootCA.pem").read_bytes()
        version = RuntimeVersionHttpInterceptor(component_name="coterie")
        with with_variable(*BESIDE_PROXY):
            client = ControlHttpClient.from_server_address(about["address"], False, authority, [version])
        try:
            return getattr(client, call)(request)
        except httpx.HTTPStatusError as error:
            raise RunError(f"Flower's SuperLink refuses {call}: {error.response.text[:300]}") from None
        except httpx.HTTPError as error:
            raise RunError(f"Flower's SuperLink does not answer ({type(error).__name__}: {error}).") from None
        finally:
            client.close()


def main() -> None:
    """Run the SuperLink on loopback and its door on the address that partners dial, until either ends."""
    from coterie.study.door import Door, serve, server

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # so that the SuperLink ends with this process
    study = Study.read(sys.argv[1])
    folder = study.folder / FOLDER
    (port,) = free_ports(1)
    (folder / "flwr").mkdir(exist_ok=True, mode=0o700)
    authority, certificate, key = (folder / name for name in ("rootCA.pem", "server.crt", "server.key"))
    command = [_program("flower-superlink"), "--host", "127.0.0.1", "--port", str(port), "--enable-supernode-auth"]
    command += ["--ssl-ca-certfile", str(authority), "--ssl-certfile", str(certificate), "--ssl-keyfile", str(key)]
    child = subprocess.Popen(command)  # it keeps messages in memory, never on disk
    try:
        _until_listening(port, child)
        FlowerLink(study).register(f"127.0.0.1:{port}")
        host = "127.0.0.1" if study.host == "localhost" else "0.0.0.0"
        door = Door(f"https://127.0.0.1:{port}", authority)
        front = server(door, host, study.ports[0], certificate, key)
        threading.Thread(target=_end_with, args=(child, front), daemon=True).start()
        asyncio.run(serve(front, door))
    finally:
        child.terminate()
        child.wait(20)


def _end_with(child: subprocess.Popen[bytes], front: Any) -> None:
    child.wait()
    front.should_exit = True


def _until_listening(port: int, child: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START
    while time.monotonic() < deadline and child.poll() is None:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.2)
    raise UsageError("Flower's SuperLink did not start; see server.log.")


if __name__ == "__main__":
    main()
