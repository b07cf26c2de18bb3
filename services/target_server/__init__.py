"""Runs the target and publishes its hidden states; also has it write its own training text."""
