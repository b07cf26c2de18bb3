"""An order drawn from a seed without a list of what is ordered.

`Permutation` is a Feistel network over the next even number of bits, walked until it lands below
`count`: position -> number in constant memory. Integer arithmetic alone, so that a resumed run
finds the same order on any machine.
"""

_64_BITS = 0xFFFFFFFFFFFFFFFF
_ROUNDS = 4


def hash_of(*parts: int) -> int:
    """Return 64 pseudo-random bits for some integers: splitmix64, folded over them."""
    state = 0
    for part in parts:
        state = (state ^ part & _64_BITS) + 0x9E3779B97F4A7C15 & _64_BITS
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & _64_BITS
        state = (state ^ state >> 27) * 0x94D049BB133111EB & _64_BITS
        state ^= state >> 31
    return state


class Permutation:
    """A bijection of 0 to `count` - 1, a function of its key."""

    def __init__(self, count: int, *key: int) -> None:
        self._count = count
        self._half = max(1, ((count - 1).bit_length() + 1) // 2)
        self._mask = (1 << self._half) - 1
        self._keys = [hash_of(*key, turn) for turn in range(_ROUNDS)]

    def __getitem__(self, position: int) -> int:
        """Return the number at a position."""
        if not 0 <= position < self._count:
            raise IndexError(position)
        number = self._once(position)
        while number >= self._count:  # a cycle that began below `count` comes back there
            number = self._once(number)
        return number

    def _once(self, number: int) -> int:
        left, right = number >> self._half, number & self._mask
        for key in self._keys:
            left, right = right, left ^ hash_of(key, right) & self._mask
        return left << self._half | right
