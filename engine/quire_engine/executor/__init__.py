"""Executors that run models with torch, in this process or across several rank processes."""
