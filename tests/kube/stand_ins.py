"""Programs in the place of etcd and kube-apiserver, for machines without them: they refuse flags that are not in the
real ones' documentation or do not fit together, and serve the tests' own API server.
"""

import argparse
import ssl
import threading
import urllib.request
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from urllib.parse import urlsplit

from cryptography.hazmat.primitives.serialization import load_pem_private_key

from tests.kube.helm_api import Cluster, HelmApi


class _Health(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()


def etcd(options: argparse.Namespace) -> None:
    """Says that it is well."""
    Path(options.data_dir).mkdir()
    assert options.listen_client_urls == options.advertise_client_urls
    HTTPServer(("127.0.0.1", urlsplit(options.listen_client_urls).port or 0), _Health).serve_forever()


def api_server(options: argparse.Namespace) -> None:
    """The tests' API server over TLS, for those with a certificate of the authority. Every Pod succeeds at once."""
    urllib.request.urlopen(f"{options.etcd_servers}/health", timeout=20).close()
    assert options.service_account_key_file == options.service_account_signing_key_file
    load_pem_private_key(Path(options.service_account_key_file).read_bytes(), None)
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=options.client_ca_file)
    tls.verify_mode = ssl.CERT_REQUIRED
    tls.load_cert_chain(options.tls_cert_file, options.tls_private_key_file)
    with HelmApi(options.secure_port, tls) as api:
        api.clusters[""] = Cluster(custom_kinds={}, play=lambda pod: 0)
        threading.Event().wait()


def main() -> None:
    """Is one of the two until it is told to end."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    programs = parser.add_subparsers(required=True)
    store = programs.add_parser("etcd", allow_abbrev=False)
    store.set_defaults(run=etcd)
    for flag in ("data-dir", "listen-client-urls", "advertise-client-urls", "listen-peer-urls"):
        store.add_argument(f"--{flag}", required=True)
    server = programs.add_parser("kube-apiserver", allow_abbrev=False)
    server.set_defaults(run=api_server)
    server.add_argument("--secure-port", type=int, required=True)
    for flag in (
        "etcd-servers", "cert-dir", "tls-cert-file", "tls-private-key-file", "client-ca-file", "service-account-issuer",
        "service-account-key-file", "service-account-signing-key-file", "service-cluster-ip-range", "advertise-address",
    ):  # fmt: skip
        server.add_argument(f"--{flag}", required=True)
    server.add_argument("--bind-address", choices=["127.0.0.1"], required=True)
    server.add_argument("--endpoint-reconciler-type", choices=["none"])
    server.add_argument("--authorization-mode", choices=["RBAC"], required=True)
    server.add_argument("--disable-admission-plugins", choices=["ServiceAccount"])
    options = parser.parse_args()
    options.run(options)


if __name__ == "__main__":
    main()
