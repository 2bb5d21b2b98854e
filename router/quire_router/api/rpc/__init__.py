"""``quire.v1.Inference`` over gRPC, with health and reflection."""
