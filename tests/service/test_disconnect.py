"""A client that goes away takes its work and its blocks with it."""

import json
import socket
import time

import grpc
import pytest
from quire.v1 import inference_pb2 as pb
from quire.v1 import inference_pb2_grpc

from tests.service.conftest import MODEL, Stack
from tests.support.processes import eventually

LONG = {"model": MODEL, "prompt": "Once", "max_tokens": 2000, "ignore_eos": True}


def running(stack: Stack) -> float:
    return sum(engine.metric("quire_engine_running_sequences") for engine in stack.engines)


def free_blocks(stack: Stack) -> float:
    return sum(engine.metric("quire_engine_free_blocks", tier="device") for engine in stack.engines)


def all_blocks(stack: Stack) -> float:
    return sum(engine.metric("quire_engine_blocks", tier="device") for engine in stack.engines)


def generated(stack: Stack) -> float:
    return sum(engine.metric("quire_engine_generation_tokens_total") for engine in stack.engines)


def open_request(stack: Stack, body: dict[str, object]) -> socket.socket:
    payload = json.dumps(body).encode()
    client = socket.create_connection(("127.0.0.1", stack.router.http_port))
    head = ["POST /v1/completions HTTP/1.1", "Host: localhost", "Content-Type: application/json"]
    head += [f"Content-Length: {len(payload)}", "", ""]
    client.sendall("\r\n".join(head).encode() + payload)
    return client


@pytest.mark.parametrize("stream", [True, False], ids=["streaming", "in one piece"])
def test_a_rest_client_that_disconnects_is_stopped(stack: Stack, stream: bool) -> None:
    client = open_request(stack, {**LONG, "stream": stream})
    eventually(lambda: running(stack) == 1, message="the request never ran")
    client.close()
    eventually(lambda: running(stack) == 0, message="the request runs on")
    assert free_blocks(stack) == all_blocks(stack)
    before = generated(stack)
    time.sleep(0.3)
    assert generated(stack) == before, "tokens are still made"


def test_a_grpc_client_that_cancels_is_stopped(stack: Stack) -> None:
    with grpc.insecure_channel(stack.router.grpc_address) as channel:
        call = inference_pb2_grpc.InferenceStub(channel).Generate(
            pb.GenerateRequest(model=MODEL, text="Once", sampling={"max_tokens": 2000, "ignore_eos": True})
        )
        next(call)
        call.cancel()
    eventually(lambda: running(stack) == 0, message="the request runs on")
    assert free_blocks(stack) == all_blocks(stack)


def test_many_clients_that_vanish_leave_nothing_behind(stack: Stack) -> None:
    clients = [open_request(stack, {**LONG, "stream": True}) for _ in range(40)]
    eventually(lambda: running(stack) == 40, message="the requests never ran")
    for client in clients:
        client.close()
    eventually(lambda: running(stack) == 0, message="requests run on")
    assert free_blocks(stack) == all_blocks(stack)
