"""Fuzz the decoder and the two protocols behind it: python -m tests.fuzz_decoder --seconds N

Broken messages may be refused, with a known reason; what is accepted must come back from its own
encoding, and neither protocol may raise what it does not document. Prints one JSON line of counts;
at a failure it prints the message, and exits with 1.
"""

import argparse
import json
import logging
import random
import sys
import time
import traceback
from collections import Counter
from typing import Any

from common.contracts.codec import MAX_MESSAGE_BYTES, encode
from common.contracts.record import Record
from common.contracts.ring_messages import (
    OWNER_DECODER,
    WORKER_DECODER,
    Descriptor,
    Pulse,
    Refused,
    Welcome,
)
from common.errors import ConfigError, MessageError, RingError
from common.ring.worker_protocol import WorkerProtocol
from tests.hostile import OWNER_HEARS, REASONS, WORKER_HEARS, any_record, mutate
from tests.rings import EPOCH, Bench

# Protocols keep what they hear: they begin anew after so many messages.
MESSAGES_A_LIFE = 2000


class Victims:
    """An owner's and a worker's protocol, which hear whatever is accepted."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self._bench = Bench(num_slots=3, max_attempts=2)
        self._sequence = 0
        self._worker = WorkerProtocol(worker_id="w", group="main", capacity=2)
        self._worker.session = 1
        self._worker.welcome = any_record(Welcome, chance, ring_epoch=EPOCH, session=1)  # type: ignore[assignment]

    def owner_hears(self, record: Record) -> None:
        """Let the owner act on it, move on, and check its accounts."""
        bench = self._bench
        bench.owner.receive(b"%d" % self._chance.randrange(1, 4), record, bench.now)
        bench.owner.outbox.clear()
        bench.wait(self._chance.choice([0.0, 0.0, 0.1, 0.3]))
        if bench.owner.book.slot_counts()["free"]:
            again = bench.owner.next_recapture()
            bench.publish(self._sequence if again is None else again)
            self._sequence += again is None
        bench.accounts()

    def worker_hears(self, record: Record) -> None:
        """Let the worker act on it; it may refuse, or say that it has to stop."""
        worker = self._worker
        try:
            if isinstance(record, Descriptor):
                if worker.take(record):
                    worker.finish(record, self._chance.choice([None, "torn"]))
            elif isinstance(record, Pulse):
                worker.hear(record)
            elif isinstance(record, Refused):
                worker.is_refused(record)
        except (MessageError, ConfigError, RingError):
            pass
        worker.beat()
        while worker.outbox:
            OWNER_DECODER.decode(encode(worker.outbox.popleft()))


def fuzz_one(chance: random.Random, victims: Victims, counts: Counter[str], raw: bytes) -> None:
    """Offer one message to both sides."""
    for decoder, hears in (
        (OWNER_DECODER, victims.owner_hears),
        (WORKER_DECODER, victims.worker_hears),
    ):
        try:
            record: Any = decoder.decode(raw)
        except MessageError as error:
            if error.reason not in REASONS:
                raise
            counts[error.reason] += 1
            continue
        assert decoder.decode(encode(record)) == record
        counts["accepted"] += 1
        hears(record)


def any_bytes(chance: random.Random) -> bytes:
    """Return a message: as it should be, broken, or no message at all."""
    fate = chance.random()
    if fate < 0.05:
        return chance.randbytes(chance.randrange(300))
    raw = encode(any_record(chance.choice(OWNER_HEARS + WORKER_HEARS), chance))
    if fate < 0.053:
        return raw + bytes(MAX_MESSAGE_BYTES)
    return raw if fate < 0.15 else mutate(raw, chance)


class Fuzzer:
    """One run of the fuzzer; the same seed makes the same messages."""

    def __init__(self, seed: int) -> None:
        self._chance = random.Random(seed)
        self._victims = Victims(self._chance)
        self.counts: Counter[str] = Counter()

    def step(self) -> bytes | None:
        """Offer one more message; return it if something escapes that should not."""
        if self.counts["messages"] % MESSAGES_A_LIFE == 0:
            self._victims = Victims(self._chance)
        self.counts["messages"] += 1
        raw = any_bytes(self._chance)
        try:
            fuzz_one(self._chance, self._victims, self.counts, raw)
        except Exception:  # noqa: BLE001 - whatever escapes is what is looked for
            traceback.print_exc()
            return raw
        return None


def main() -> int:
    """Fuzz for the time that is asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=time.time_ns() % (1 << 32))
    options = parser.parse_args()
    logging.disable()
    fuzzer, failure = Fuzzer(options.seed), None
    deadline = time.monotonic() + options.seconds
    while failure is None and time.monotonic() < deadline:
        failure = fuzzer.step()
    found = {"failure": failure.hex()} if failure is not None else {}
    print(json.dumps({"seed": options.seed, **fuzzer.counts, **found}))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
