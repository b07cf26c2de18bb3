"""What test rows are filled with: every field of every row differs, so a byte of another row shows."""

import random
import zlib

FIELDS = ("token_ids", "document_ids", "position_ids", "loss_mask", "aux_hidden_states")
_NUM_CONTENTS = 65_521  # a prime: that many sequences have contents of their own
_MOST_BYTES = 1 << 16
_NOISE = random.Random(20).randbytes(_NUM_CONTENTS + _MOST_BYTES)


def content(sequence: int, name: str, num_bytes: int) -> bytes:
    """Return what field `name` of row `sequence` holds."""
    assert num_bytes <= _MOST_BYTES
    start = (sequence * 7919 + zlib.crc32(name.encode())) % _NUM_CONTENTS
    return _NOISE[start : start + num_bytes]


def is_content(sequence: int, copies: dict[str, bytes]) -> bool:
    """Whether every byte of these fields is the row's."""
    return all(content(sequence, name, len(copy)) == copy for name, copy in copies.items())
