"""The seed of one answer: a function of the run's seed and of what is answered, alone."""

import json

import xxhash


def answer_seed(run_seed: int, name: str | int, turn: int) -> int:
    """Return 64 bits for the answer to turn `turn` (in a stream: data epoch) of a conversation."""
    return xxhash.xxh3_64_intdigest(json.dumps([run_seed, name, turn]).encode())
