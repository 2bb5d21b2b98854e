"""What clients see: OpenAI-style REST, ``quire.v1.Inference`` over gRPC, and one validator for both."""
