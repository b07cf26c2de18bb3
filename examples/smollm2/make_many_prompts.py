"""Makes tens of thousands of prompts from three sources, and held-out files of three.

    python examples/smollm2/make_many_prompts.py --foldoc DIR/foldoc --gcide DIR/gcide \\
        --human-eval HumanEval.jsonl.gz --output DIR

Terms of FOLDOC, words of GCIDE (both as make_prompts.py takes them) and documented functions of
Python's own library are asked about in prompts.jsonl; words.jsonl and terms.jsonl ask about others of
the first two, and human_eval.jsonl about the functions of HumanEval, of which nobody trains. The same
inputs and the same Python give the same files.
"""

import argparse
import ast
import gzip
import json
import random
import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from make_prompts import NOUN_QUESTIONS, SEED, TERM_QUESTIONS, ask, entries, write

NUM_TERMS, NUM_WORDS = 9000, 9000
NUM_HELD_OUT = 100
FUNCTION_TASKS = (
    "Complete this Python function:\n\n```python\n{}```",
    "Write the body of this Python function.\n\n```python\n{}```",
    "What would this Python function do? Show how it is called.\n\n```python\n{}```",
)
_UNFIT_FOLDERS = {
    "__pycache__", "dist-packages", "idlelib", "lib2to3", "site-packages", "test", "tests",
    "turtledemo",
}  # fmt: skip
_LONGEST_SOURCE = 600


def main() -> None:
    """Write prompts.jsonl and three files of held-out prompts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name in ("foldoc", "gcide", "human-eval", "output"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    options = parser.parse_args()
    choice = random.Random(SEED)
    terms = choice.sample(_headwords(options.foldoc, r"[A-Za-z][A-Za-z \-]{2,30}"), NUM_TERMS)
    words = choice.sample(_headwords(options.gcide, r"[A-Z][a-z]{3,11}"), NUM_WORDS)
    about_terms = ask(choice, terms, TERM_QUESTIONS)
    about_words = ask(choice, [word.lower() for word in words], NOUN_QUESTIONS)
    about_functions = [choice.choice(FUNCTION_TASKS).format(f) for f in _library_functions()]
    prompts = [*about_terms[NUM_HELD_OUT:], *about_words[NUM_HELD_OUT:], *about_functions]
    choice.shuffle(prompts)
    options.output.mkdir(parents=True, exist_ok=True)
    write(options.output / "prompts.jsonl", "prompt", prompts)
    write(options.output / "terms.jsonl", "term", about_terms[:NUM_HELD_OUT])
    write(options.output / "words.jsonl", "word", about_words[:NUM_HELD_OUT])
    tasks = [FUNCTION_TASKS[0].format(source) for source in _human_eval(options.human_eval)]
    write(options.output / "human_eval.jsonl", "HumanEval", tasks)


def _headwords(stem: Path, pattern: str) -> list[str]:
    """Return the dictionary's words of a form, as it writes them, once each and sorted."""
    found = {text.splitlines()[0].strip(): word for word, text in entries(stem) if text.strip()}
    words = {
        first if first.lower() == word.lower() else word
        for first, word in found.items()
        if re.fullmatch(pattern, first if first.lower() == word.lower() else word)
    }
    return sorted(words)


def _library_functions() -> list[str]:
    """Return head and documentation of the functions of Python's library, once a name."""
    root = Path(sysconfig.get_paths()["stdlib"])
    found: dict[str, str] = {}
    for path in sorted(root.rglob("*.py")):
        if not _UNFIT_FOLDERS.intersection(path.relative_to(root).parts):
            for name, source in _functions_in(path):
                found.setdefault(f"{path.stem}.{name}", source)
    return list(found.values())


def _functions_in(path: Path) -> Iterator[tuple[str, str]]:
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (SyntaxError, UnicodeDecodeError):
        return  # kept by the library as an example of what is none
    for node in ast.walk(tree):
        is_public = isinstance(node, ast.FunctionDef) and not node.name.startswith("_")
        if is_public and len(ast.get_docstring(node) or "") >= 20:
            node.body, node.decorator_list = node.body[:1], []
            source = ast.unparse(node) + "\n"
            if len(source) <= _LONGEST_SOURCE:
                yield node.name, source


def _human_eval(path: Path) -> list[str]:
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        return [json.loads(line)["prompt"] for line in lines]


if __name__ == "__main__":
    main()
