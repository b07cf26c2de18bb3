"""Drafters, one folder each, with the same file names inside."""
