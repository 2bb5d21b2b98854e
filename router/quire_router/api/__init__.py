"""What clients see: one service under OpenAI-style REST and ``quire.v1.Inference`` over gRPC, with one validator."""
