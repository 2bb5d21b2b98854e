"""Asks the routers for a short answer over gRPC. Without a key of its own it only sees that the door is closed."""

import os

import grpc
from quire.v1 import inference_pb2, inference_pb2_grpc, types_pb2

key = os.environ.get("API_KEY", "").split(",")[0]
request = inference_pb2.GenerateRequest(
    model=os.environ["MODEL"], text="Once upon a time", sampling=types_pb2.SamplingParams(max_tokens=4)
)
metadata = [("authorization", f"Bearer {key}")] if key else []
with grpc.insecure_channel(os.environ["ADDRESS"]) as channel:
    stub = inference_pb2_grpc.InferenceStub(channel)
    try:
        pieces = list(
            stub.Generate(request, metadata=metadata, timeout=float(os.environ["SECONDS_TO_WAIT"]), wait_for_ready=True)
        )
    except grpc.RpcError as error:
        closed = error.code() is grpc.StatusCode.UNAUTHENTICATED
        if key or os.environ["AUTH_MODE"] == "none" or not closed:
            away = error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
            hint = os.environ["HINT"] if away else ""
            raise SystemExit(f"{error.code().name}: {error.details()}\n{hint}") from error
        print("The routers answer, and let nobody in without a key.")
    else:
        tokens = sum(len(piece.token_ids) for piece in pieces)
        assert tokens > 0, "the answer is empty"
        print(f"{request.model} answered over gRPC with {tokens} tokens.")
