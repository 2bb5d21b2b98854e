"""Connections to the engines, their sessions and output streams, and what is known of each engine's load and cache."""
