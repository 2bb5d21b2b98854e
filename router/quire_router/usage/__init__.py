"""The subcommand ``quire-router usage``: what tenants used, from where routers keep it."""
