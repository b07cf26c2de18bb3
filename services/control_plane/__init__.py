"""Registry, health, status and metrics of a run; touches no tensor."""
