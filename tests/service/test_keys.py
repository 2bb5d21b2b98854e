"""Keys of a router that runs: its tenants' file is replaced, and an issuer's tokens are taken."""

import json
import os
import threading
from contextlib import closing
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from time import monotonic, sleep, time

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import rsa

from tests.service.conftest import DEMO
from tests.support.processes import Router, wait_healthy
from tests.support.redis_server import redis_server

KEY, OTHER = "a-long-enough-key", "another-long-key"
SIGNER = rsa.generate_private_key(public_exponent=65537, key_size=2048)


class Issuer(BaseHTTPRequestHandler):
    def do_GET(self):
        url = f"http://127.0.0.1:{self.server.server_port}"
        key = {**jwt.algorithms.RSAAlgorithm.to_jwk(SIGNER.public_key(), as_dict=True), "kid": "1", "use": "sig"}
        answers = {
            "/.well-known/openid-configuration": {"issuer": url, "jwks_uri": f"{url}/keys"},
            "/keys": {"keys": [key]},
        }
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(answers[self.path]).encode())

    def log_message(self, *_):
        pass


@pytest.fixture
def issuer():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Issuer)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def put(path, *keys):
    """Replaces the file as a mounted Secret is: at once."""
    entries = [{"name": "a", "keys": list(keys), "claims": ["alice"]}]
    (path.parent / "next").write_text(json.dumps({"tenants": entries}))
    os.replace(path.parent / "next", path)


def status(router, key):
    """Over a connection of its own, without the certificates that a client of httpx would load for each."""
    connection = HTTPConnection("127.0.0.1", router.http_port, timeout=20)
    with closing(connection):
        connection.request("GET", "/v1/models", headers={"authorization": f"Bearer {key}"})
        return connection.getresponse().status


def test_every_worker_takes_the_keys_of_a_replaced_file_and_tokens(issuer, tmp_path):
    path = tmp_path / "tenants.json"
    put(path, KEY)
    claims = {"iss": issuer, "aud": "quire", "sub": "alice", "exp": time() + 600}
    token = jwt.encode(claims, SIGNER, "RS256", headers={"kid": "1"})
    flags = ("--tenants", str(path), "--oidc-issuer-url", issuer, "--oidc-client-id", "quire", "--workers", "2")
    with redis_server() as redis:
        router = Router(DEMO, [], tmp_path, "--redis-url", redis.url, *flags)
        try:
            wait_healthy(router, router.http_port, "/live")
            before = [status(router, OTHER) for _ in range(8)]
            put(path, OTHER)
            deadline, seen = monotonic() + 60, []
            while seen[-16:] != [(200, 401)] * 16:  # connections are new, and either worker's
                assert monotonic() < deadline, seen[-3:]
                seen.append((status(router, OTHER), status(router, KEY)))
                sleep(0.05)
            tokens = [status(router, token) for _ in range(8)]
        finally:
            code = router.stop()

    assert (before, tokens, code) == ([401] * 8, [200] * 8, 0)
    assert KEY not in router.text
    assert OTHER not in router.text
