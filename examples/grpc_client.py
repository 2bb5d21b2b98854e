"""Streams a text over gRPC: ``python examples/grpc_client.py``.

Ask ``quire serve demo/model --served-model-name quire-demo``, or set QUIRE_GRPC and MODEL.
"""

import os

import grpc
from quire.v1 import inference_pb2, inference_pb2_grpc, types_pb2

with grpc.insecure_channel(os.environ.get("QUIRE_GRPC", "127.0.0.1:8001")) as channel:
    request = inference_pb2.GenerateRequest(
        model=os.environ.get("MODEL", "quire-demo"),
        text="Once upon a time",
        sampling=types_pb2.SamplingParams(max_tokens=32),
    )
    for piece in inference_pb2_grpc.InferenceStub(channel).Generate(request):
        print(piece.text, end="", flush=True)
print()
