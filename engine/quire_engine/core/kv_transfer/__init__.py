"""Tiers of KV memory behind the device's: the ``KVConnector`` protocol, and a file for each tier."""
