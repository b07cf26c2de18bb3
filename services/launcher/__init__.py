"""The `ringdraft` command: starts, watches and stops the services of one run on one machine."""
