"""The frozen target: its files, its weights, its chat template, its hidden states."""
