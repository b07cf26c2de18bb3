"""Frozen records for everything that crosses a process border, and their codec."""
