"""Check the models of the ring protocol with Spin: `make model-check`.

Each run is a model, macros that set its budgets of faults and break its rules, and what must come out:
every claim holds, or, for a broken rule, one claim by name fails. A run judges a broken rule by that
claim alone, so no other error passes for it. A search that was cut off, by its depth, memory or time,
shows nothing and counts as wrong. Prints a line a run; ends with 1 if any is wrong, with 2 where spin
or a C compiler is missing.

    python docs/models/check.py                  every run
    python docs/models/check.py rows CRASH       those whose line has all these words
"""

import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

MODELS = Path(__file__).resolve().parent
AT_ONCE = 2
MEMORY_MIB = 2800
"""Of one search, so that two stay below 6 GiB."""
DEPTH = 20_000
SECONDS = 600
# What pan says of a search that it did not end.
CUT_OFF = (
    "max search depth too small",
    "reached -DMEMLIM bound",
    "out of memory",
    "Search not completed",
)
HOLDS = "holds"


@dataclass(frozen=True)
class Run:
    """One search of one model.

    Attributes:
        macros: `NAME` or `NAME=value`, separated by spaces.
        fails: the claim that must fail; empty where all must hold.
        ends: look for runs that never end instead of claims that fail.
    """

    model: str
    macros: str = ""
    fails: str = ""
    ends: bool = False

    @property
    def expected(self) -> str:
        """The verdict that the search must come to."""
        return f"fails: {self.fails}" if self.fails else HOLDS

    def __str__(self) -> str:
        return f"{self.model} {'ends ' if self.ends else ''}{self.macros}".strip()


# The searches that take longest come first, for both cores to be busy until the end.
SOUND = (
    Run("slots", "OWNER_CRASH=1 DUP=1"),
    Run("slots", "WORKER_CRASH=1 LOSS=2 DUP=1 REORDER=1"),
    Run("rows", "WORKER_CRASH=1 LOSS=2 DUP=1"),
    Run("rows", "OWNER_CRASH=1 LOSS=1"),
    Run("slots", "OWNER_CRASH=1 LOSS=2"),
    Run("rows", "OWNER_CRASH=1 WORKER_CRASH=1 SAVE=0"),
    Run("slots", "EARLY=1 LOSS=2 DUP=1"),
    Run("slots", "HANG=1 EARLY=1 EXTRA=1 LOSS=1"),
    Run("slots", "SUSPECT=1 EARLY=1 LOSS=1"),
    Run("slots", "LOSS=2 DUP=1 REORDER=1"),
    Run("slots", "SUSPECT=1 HANG=1 EXTRA=1"),
    Run("slots", "UNSENT=1 EARLY=1 EXTRA=1"),
    Run("slots", "EARLY=2 LOSS=1 MAX_ATTEMPTS=2"),
    Run("slots", "BAD=1 SKIP=1 LOSS=1"),
    Run("rows", "LOSS=2 DUP=1 REORDER=1"),
    Run("rows", "EARLY=1 SKIP=1"),
    Run("rows", "SUSPECT=1 LOSS=1"),
    Run("credit", "LOSS=2 DUP=1 REORDER=1 EXTRA=1"),
    Run("credit", "SUSPECT=1 EARLY=1 BAD=1 LOSS=2 DUP=1"),
    Run("copy"),
    Run("slots", "EARLY=1 LOSS=1 DUP=1", ends=True),
    Run("rows", "WORKER_CRASH=1 LOSS=1 SAVE=0", ends=True),
    Run("credit", "SUSPECT=1 LOSS=1 DUP=1", ends=True),
)
BROKEN = (
    Run("copy", "NO_INVALIDATION", "accepted_copy_is_whole"),
    Run("copy", "NO_CHECK", "accepted_copy_is_whole"),
    Run("copy", "NO_FENCE_BEFORE_PAYLOAD", "accepted_copy_is_whole"),
    Run("copy", "NO_FENCE_BEFORE_CHECK", "accepted_copy_is_whole"),
    Run("slots", "NO_INVALIDATION EARLY=1", "accepted_copy_is_whole"),
    Run("slots", "NO_CHECK EARLY=1", "accepted_copy_is_whole"),
    Run("slots", "RELEASE_BY_SLOT EARLY=1", "released_row_was_accepted"),
    Run("slots", "RELEASE_BY_GENERATION EARLY=1", "answer_ends_its_own_lease"),
    Run("slots", "NO_EPOCH OWNER_CRASH=1 DUP=1", "released_row_was_accepted"),
    Run("slots", "HEARTBEAT_TAKES_OVER EARLY=1 EXTRA=1", "heartbeat_moves_no_lease"),
    Run("slots", "RENEWAL_WITHOUT_CAP HANG=1", "something_happens_in_time"),
    Run("slots", "IGNORE_DEBT HANG=1 EARLY=1", "something_happens_in_time"),
    Run("slots", "OLD_HEARTBEAT_PAYS HANG=1 EARLY=1 EXTRA=1", "something_happens_in_time"),
    Run("slots", "DEBTOR_IS_RENEWED HANG=1 EARLY=1 EXTRA=1", "something_happens_in_time"),
    Run("slots", "NO_RESEND LOSS=1", "lost_messages_cost_no_attempt"),
    Run("slots", "REQUEUE_ON_LOSS LOSS=1", "lost_messages_cost_no_attempt"),
    Run("slots", "FORGET_OUTCOMES LOSS=1", "lost_messages_train_no_row_twice"),
    Run("credit", "INCREMENTAL CAP=6 LOSS=1", "credit_comes_back"),
    Run("credit", "INCREMENTAL ROWS=4 DUP=1", "leases_stay_within_buffers"),
    Run("credit", "NO_NUMBERS REORDER=1", "granted_lease_finds_room"),
    Run("credit", "BUSY_IS_CAPACITY", "granted_lease_finds_room"),
    Run("credit", "HELLO_OFFERS", "granted_row_can_be_read"),
    Run("credit", "TAKE_WITHOUT_ROOM EARLY=1 EXTRA=1", "no_buffer_is_filled_twice"),
    Run("credit", "HEARTBEAT_WITHOUT_CAPACITY LOSS=1", "credit_comes_back"),
    Run("rows", "CURSOR_AT_PUBLISH OWNER_CRASH=1 WORKER_CRASH=1", "every_row_survives"),
    Run("rows", "CURSOR_AT_RELEASE OWNER_CRASH=1 WORKER_CRASH=1", "every_row_survives"),
    Run("rows", "NO_CLAIMS OWNER_CRASH=1", "told_row_is_not_captured_again"),
    Run("rows", "RELEASE_CONSUMES WORKER_CRASH=1", "every_row_survives"),
    Run("rows", "STAGED_IS_CONSUMED WORKER_CRASH=1", "every_row_survives"),
    Run("rows", "COMMIT_BEFORE_SAVE WORKER_CRASH=1", "every_row_survives"),
    Run("rows", "END_AT_LAST_PUBLISH WORKER_CRASH=1", "something_happens_in_time"),
    Run("rows", "END_AT_LAST_PUBLISH LOSS=1", "something_happens_in_time"),
    Run("rows", "DRAINED_WHEN_RELEASED WORKER_CRASH=1", "drained_means_that_all_survives"),
)


def main() -> int:
    """Make the runs that the command line asks for and say what came of each."""
    missing = [name for name in ("spin", "gcc") if shutil.which(name) is None]
    if missing:
        say(f"model-check: {' and '.join(missing)} not found; the models are checked with spin and "
            f"a C compiler. On Debian: apt-get install spin gcc", sys.stderr)  # fmt: skip
        return 2
    limit_memory()
    runs = [run for run in SOUND + BROKEN if all(word in str(run) for word in sys.argv[1:])]
    began_at = time.monotonic()
    with ThreadPoolExecutor(AT_ONCE) as pool:
        num_wrong = sum(not is_right for is_right in pool.map(check, runs))
    say(f"{len(runs)} runs, {num_wrong} not as expected, {time.monotonic() - began_at:.0f} s")
    return 1 if num_wrong or not runs else 0


def check(run: Run) -> bool:
    """Make one run, print its line and return whether it came out as it must."""
    began_at = time.monotonic()
    output = search(run)
    verdict = verdict_of(output, ends=run.ends)
    is_right = verdict == run.expected
    seconds = time.monotonic() - began_at
    line = f"{'ok   ' if is_right else 'WRONG'} {run!s:<58} {verdict}"
    say(f"{line} ({num_states(output):,} states, {seconds:.1f} s)")
    if not is_right:
        say(f"      expected: {run.expected}\n" + output[-2000:])
    return is_right


def search(run: Run) -> str:
    """Generate, compile and make a search; return all that the three programs say."""
    macros = [f"-D{macro}" for macro in run.macros.split()]
    if run.fails:
        macros.append(f"-DFOCUS={run.fails}")
    kind = ["-DNP"] if run.ends else ["-DSAFETY"]
    steps = (
        ["spin", "-a", *macros, str(MODELS / f"{run.model}.pml")],
        ["gcc", "-w", "-O2", *kind, "-DCOLLAPSE", "-DNOFAIR", f"-DMEMLIM={MEMORY_MIB}",
         "-o", "pan", "pan.c"],
        ["./pan", f"-m{DEPTH}", "-w22", "-n", *(["-l"] if run.ends else [])],
    )  # fmt: skip
    output = ""
    with tempfile.TemporaryDirectory(prefix="model-check-") as directory:
        for step in steps:
            try:
                done = subprocess.run(
                    step, cwd=directory, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                    text=True, timeout=SECONDS, check=False,
                )  # fmt: skip
            except subprocess.TimeoutExpired:
                return f"{output}{step[0]}: Search not completed within {SECONDS} s\n"
            output += done.stdout
            if done.returncode != 0:
                return f"{output}{step[0]} ended with {done.returncode}\n"
    return output


def limit_memory() -> None:
    """Bound what this process and each of its children can map, whatever pan counts itself."""
    most = (MEMORY_MIB + 200) << 20
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


def verdict_of(output: str, *, ends: bool = False) -> str:
    """Return what a search showed: that all holds, which claim fails, or why it shows nothing.

    Args:
        output: what spin, gcc and pan said.
        ends: whether the search was for runs that never end.
    """
    found = re.search(r"^pan:1: (?:assertion violated )?(.*?) \(at depth", output, re.MULTILINE)
    if found:  # pan stops here, and says that its search is not completed
        return f"fails: {found[1].strip('() ')}"
    for sign in CUT_OFF:
        if sign in output:
            return f"cut off: {sign}"
    looked_for = (
        ("non-progress cycles",) if ends else ("assertion violations", "invalid end states")
    )
    has_looked = all(re.search(rf"{what}\s+\+", output) for what in looked_for)
    if has_looked and re.search(r"^State-vector .* errors: 0$", output, re.MULTILINE):
        return HOLDS
    return "broken: no search took place"


def num_states(output: str) -> int:
    """Return how many states a search stored."""
    stored = re.search(r"^\s*([0-9.e+]+) states, stored", output, re.MULTILINE)
    return int(float(stored[1])) if stored else 0


def say(text: str, stream: TextIO = sys.stdout) -> None:
    """Print at once, for whoever waits at the other end of a pipe."""
    print(text, file=stream, flush=True)


if __name__ == "__main__":
    sys.exit(main())
