"""Sizes that keep files readable; an exception needs a reason here."""

import ast
import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE_LINES, TEST_LINES, FUNCTION_LINES, PAGE_LINES = 400, 500, 60, 300
PAGE = ROOT / "services" / "control_plane" / "static"
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


def page_files() -> list[Path]:
    own = [path for path in PAGE.rglob("*") if path.is_file() and "vendor" not in path.parts]
    return sorted(own)


def test_files_of_the_page_are_within_their_limit_and_put_no_markup_together() -> None:
    makes_markup = re.compile(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(")
    wrong = []
    for path in page_files():
        text = path.read_text(encoding="utf-8")
        if text.count("\n") > PAGE_LINES:
            wrong.append(f"{path.name}: {text.count(chr(10))} lines, at most {PAGE_LINES}")
        wrong += [f"{path.name}: {found}" for found in makes_markup.findall(text)]
    assert not wrong, wrong


def test_every_file_of_the_page_is_in_the_wheel() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    patterns = settings["tool"]["setuptools"]["package-data"]["services.control_plane"]
    package = PAGE.parent
    shipped = {path for pattern in patterns for path in package.glob(f"{pattern}/*")}
    assert {path for path in PAGE.rglob("*") if path.is_file()} <= shipped


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
