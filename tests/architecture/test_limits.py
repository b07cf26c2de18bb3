"""Sizes that keep files readable; an exception needs a reason here."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE_LINES, TEST_LINES, FUNCTION_LINES = 400, 500, 60
ALLOWED: dict[str, str] = {}


def sources() -> list[Path]:
    folders = ("common", "services", "tests", "benchmarks", "examples")
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


def test_files_and_functions_are_within_their_limits() -> None:
    over = []
    for path in sources():
        name = str(path.relative_to(ROOT))
        text = path.read_text(encoding="utf-8")
        limit = TEST_LINES if name.startswith("tests/") else SOURCE_LINES
        if text.count("\n") > limit and name not in ALLOWED:
            over.append(f"{name}: {text.count(chr(10))} lines, at most {limit}")
        over += [
            f"{name}:{node.lineno} {node.name}: {node.end_lineno - node.lineno + 1} lines"
            for node in ast.walk(ast.parse(text))
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            and node.end_lineno - node.lineno + 1 > FUNCTION_LINES
        ]
    assert not over, "\n".join(over)


def test_every_module_opens_with_what_it_is_for() -> None:
    silent = [
        str(path.relative_to(ROOT))
        for path in sources()
        if path.read_text(encoding="utf-8").strip()
        and not ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    ]
    assert not silent, silent


def test_the_tree_has_the_fixed_top_level() -> None:
    for name in ("pyproject.toml", "services/target_server", "services/drafter_worker",
                 "common", "compose", "tests"):  # fmt: skip
        assert (ROOT / name).exists(), name
