"""Grammars that outputs follow: tried out in a sandbox, compiled by llguidance, matched as bitmasks."""
