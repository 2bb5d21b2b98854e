"""Several router processes on one port: who starts them, and what one of them is told."""
