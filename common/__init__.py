"""What the five services share: contracts, config, rings, the target and the drafters."""
