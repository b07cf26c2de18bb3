"""Leases rows, trains a drafter on them, writes servable checkpoints."""
