"""Executors with torch: in this process, or over the processes of several ranks."""
