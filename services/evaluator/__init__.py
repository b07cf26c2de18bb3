"""Decodes held-out prompts with the target, plainly and with a drafter's help, and compares."""
