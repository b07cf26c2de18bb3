"""The quorum server: tells the workers of a synced group who of them is there."""
