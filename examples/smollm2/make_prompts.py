"""Makes the demo's prompts: short questions about common terms, nouns, modules and functions.

    python examples/smollm2/make_prompts.py --foldoc DIR/foldoc --gcide DIR/gcide \\
        --human-eval HumanEval.jsonl.gz --output examples/smollm2

DIR/foldoc stands for foldoc.index and foldoc.dict.dz of Debian's dict-foldoc, and likewise for
dict-gcide; only headwords and counts are taken from them. Of HumanEval only the names of its
functions are taken, of Python the names of its modules. The same inputs give the same files.
"""

import argparse
import gzip
import json
import random
import re
import string
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

SEED = 20
NUM_HELD_OUT = 60
_DIGITS = string.ascii_uppercase + string.ascii_lowercase + string.digits + "+/"

# How many subjects of each kind are asked about.
NUM_TERMS, NUM_NOUNS = 800, 700
_UNFIT_NOUNS = {"intercourse", "gallows", "urine", "women", "workmen", "phenomena", "strata"}

TERM_QUESTIONS = (
    "What is {} in computing? Answer in one or two sentences.",
    "Explain the term {} in simple words.",
    "What is {} used for?",
    "Define {} in one sentence.",
    "Give a short example of {}.",
    "Why does {} matter to a programmer?",
    "Tell me briefly about {}.",
)
NOUN_QUESTIONS = (
    "What is a {}? Answer in one or two sentences.",
    "Write one sentence about a {}.",
    "List three things that go with a {}.",
    "Describe a {} to a child.",
    "Use the word {} in two short sentences.",
    "What is a {} for?",
    "Name three facts about a {}.",
    "Write a short poem of four lines about a {}.",
)
MODULE_QUESTIONS = (
    "What is the Python module {} used for?",
    "Show a short example of the Python module {}.",
    "When should I use Python's {} module? Answer briefly.",
)
FUNCTION_QUESTIONS = (
    "Write a short Python function called {}.",
    "What would a Python function called {} do? Answer in one sentence.",
)


def main() -> None:
    """Write prompts.jsonl and held_out.jsonl."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name in ("foldoc", "gcide", "human-eval", "output"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    options = parser.parse_args()
    choice = random.Random(SEED)
    prompts = [
        *ask(choice, choice.sample(_computing_terms(options.foldoc), NUM_TERMS), TERM_QUESTIONS),
        *ask(choice, choice.sample(_common_nouns(options.gcide), NUM_NOUNS), NOUN_QUESTIONS),
        *ask(choice, _modules(), MODULE_QUESTIONS),
        *ask(choice, _functions(options.human_eval), FUNCTION_QUESTIONS),
    ]
    choice.shuffle(prompts)
    write(options.output / "held_out.jsonl", "held-out", prompts[:NUM_HELD_OUT])
    write(options.output / "prompts.jsonl", "prompt", prompts[NUM_HELD_OUT:])


def ask(choice: random.Random, subjects: list[str], questions: tuple[str, ...]) -> list[str]:
    asked = [choice.choice(questions).format(subject) for subject in subjects]
    return [re.sub(r"\ba (?=[aeiou])", "an ", question) for question in asked]


def _computing_terms(stem: Path) -> list[str]:
    """Return FOLDOC's headwords that at least eight links of other entries name."""
    known = list(entries(stem))
    links: Counter[str] = Counter()
    for text in (text for _, text in known):
        links.update(" ".join(link.split()).lower() for link in re.findall(r"\{([^{}]+)\}", text))
    unfit = re.compile(r"<[^>]*(jargon|abuse|humou?r|person|company|legal)[^>]*>")
    terms = {
        text.splitlines()[0].strip()
        for word, text in known
        if re.fullmatch(r"[a-z][a-z \-]{2,20}", word)
        and text.splitlines()[0].strip().lower() == word
        and links[word] >= 8
        and len(text) > 200
        and not unfit.search(text[:200])
    }
    return sorted(terms)


def _common_nouns(stem: Path) -> list[str]:
    """Return the words that are nouns only and that GCIDE's own definitions use most."""
    known = list(entries(stem))
    uses: Counter[str] = Counter()
    for _, text in known:
        uses.update(re.findall(r"[a-z]+", text))
    kinds: dict[str, set[str]] = {}
    for word, text in known:
        if re.fullmatch(r"[A-Z][a-z]{3,11}", word):
            kind = re.search(r"\\,? (n|v|a|adv|imp|p|prep)\.", text[:120])
            kinds.setdefault(word.lower(), set()).add(kind[1] if kind else "")
    nouns = [
        word
        for word, found in kinds.items()
        if found == {"n"} and not re.search(r"[^s]s$", word) and word not in _UNFIT_NOUNS
    ]
    nouns.sort(key=lambda noun: (-uses[noun], noun))
    return sorted(nouns[:800])


def _modules() -> list[str]:
    return sorted(name for name in sys.stdlib_module_names if re.fullmatch(r"[a-z]{4,}", name))


def _functions(path: Path) -> list[str]:
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        names = {json.loads(line)["entry_point"] for line in lines}
    return sorted(name for name in names if "_" in name)


def entries(stem: Path) -> Iterator[tuple[str, str]]:
    """Yield headword and text of a dictionary in the format of dictd."""
    text = gzip.decompress(Path(f"{stem}.dict.dz").read_bytes())
    for line in Path(f"{stem}.index").read_text(encoding="utf-8").splitlines():
        word, start, length = line.split("\t")[:3]
        first = _number(start)
        yield word, text[first : first + _number(length)].decode("utf-8", "replace")


def _number(digits: str) -> int:
    value = 0
    for digit in digits:
        value = value * 64 + _DIGITS.index(digit)
    return value


def write(path: Path, kind: str, prompts: list[str]) -> None:
    with path.open("w", encoding="utf-8") as output:
        for number, text in enumerate(prompts):
            message = {"role": "user", "content": text}
            record = {"id": f"{kind}-{number:04d}", "messages": [message]}
            output.write(json.dumps(record, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
