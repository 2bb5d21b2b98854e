"""The engine on the network: gRPC, health, metrics, spans and the orderly end. Never imports torch."""
