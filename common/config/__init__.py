"""Settings: TOML files, `--set`, environment; the one door to the environment."""
