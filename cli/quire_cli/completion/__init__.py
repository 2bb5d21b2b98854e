"""``quire completion``: scripts with which shells complete commands, flags and their values."""
