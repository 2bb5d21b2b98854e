"""The engine on the network: gRPC sessions, health, metrics, traces, drain. Never imports torch."""
