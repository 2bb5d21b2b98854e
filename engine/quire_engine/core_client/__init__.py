"""The engine core as a server sees it: on a thread of the server's process, or in a process of its own."""
