"""Makes train.jsonl of what the target answered: leaves out empty answers and endless loops.

    python examples/smollm2/select_answers.py ANSWERS TRAIN

An answer loops where some run of five words occurs six times or more; greedy decoding of a small
model does that now and then, and a drafter learns nothing from it but to repeat. Answers that
were cut at the length limit stay: they are what the target writes, and say so by finish_reason.
"""

import json
import sys
from collections import Counter
from pathlib import Path

RUN_WORDS = 5
MOST_REPEATS = 5


def main(answers: Path, train: Path) -> None:
    """Write the usable answers, ordered by id."""
    rows = [json.loads(line) for line in answers.read_text(encoding="utf-8").splitlines()]
    kept = [row for row in rows if is_usable(row["messages"][-1]["content"])]
    kept.sort(key=lambda row: row["id"])
    lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in kept]
    train.write_text("".join(lines), encoding="utf-8")
    cut = sum(row["finish_reason"] == "length" for row in kept)
    print(f"{len(rows)} answers, {len(kept)} kept, of which {cut} were cut")  # noqa: T201


def is_usable(answer: str) -> bool:
    """Say whether an answer has words and does not go round in a loop."""
    words = answer.split()
    runs = Counter(tuple(words[i : i + RUN_WORDS]) for i in range(len(words) - RUN_WORDS + 1))
    return bool(words) and max(runs.values(), default=0) <= MOST_REPEATS


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
