"""Where conversations come from: files, their order, and the formats of their rows."""
