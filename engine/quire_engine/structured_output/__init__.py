"""Grammars that outputs follow: tried in a sandbox, compiled by llguidance, matched as bitmasks."""
