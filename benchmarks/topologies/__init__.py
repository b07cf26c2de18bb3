"""Runs on one, two, four and eight GPUs of a host: a script each, and what they share."""
