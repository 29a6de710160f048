"""Settings: frozen tables, checked once, TOML in and out."""
