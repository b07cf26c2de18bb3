"""One frame of `ringdraft top`: a status as lines of a given width, what matters most first.

Pure. Each line is cut to the width. A table that does not fit shortens its names, leaves out texts, and goes
on in a second block; it leaves out figures, the least important first, where two do not hold them or where
the frame would get too high.
Text of other processes is shown without its control characters, which a terminal would obey.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rich.cells import cell_len, set_cell_size
from rich.text import Text

from services.launcher.figures import absence, counts, holders, number, share
from services.launcher.progress import rows_trained

Row = dict[str, Any]
_GAP = "  "
_MEBIBYTE = 1 << 20
_ELLIPSIS = "\N{HORIZONTAL ELLIPSIS}"
_LEAST_NAME = 12
"""Columns that are left of a name before figures have to go elsewhere."""
_KEPT_OVERDUE = 4
_KEPT_ERRORS = 3
_KEPT_EVALUATIONS = 5
UNREACHABLE = "control plane not reachable, trying again"


@dataclass(frozen=True)
class Column:
    """A column and its cells; `rank` 0 is the last to be left out, texts go before figures."""

    head: str
    rank: int
    cells: tuple[str, ...]
    is_text: bool = False

    @property
    def width(self) -> int:
        """Columns of the terminal that it takes."""
        return max(cell_len(text) for text in (self.head, *self.cells))


def frame(status: Row | None, *, is_answered: bool, width: int, height: int | None) -> list[Text]:
    """Return the lines of a frame, at most `height` of them where it is given."""
    lines = list(_lines(status, is_answered=is_answered, width=width, most_blocks=2))
    if height is not None and len(lines) > height:
        lines = list(_lines(status, is_answered=is_answered, width=width, most_blocks=1))
    if height is not None and len(lines) > height:
        num_left_out = len(lines) - height + 1
        lines[height - 1 :] = [Text(f"... {num_left_out} more lines", "dim")]
    for line in lines:
        line.truncate(width, overflow="ellipsis")
    return lines


def _lines(
    status: Row | None, *, is_answered: bool, width: int, most_blocks: int
) -> Iterator[Text]:
    if not is_answered:
        yield Text(UNREACHABLE, "bold red")
    if status is None:
        return
    yield from _summary(status, width)
    overdue = status["overdue"]
    for entry in overdue[:_KEPT_OVERDUE]:
        yield from _wrapped(entry["text"], "red", width)
    if len(overdue) > _KEPT_OVERDUE:
        yield Text(f"... {len(overdue) - _KEPT_OVERDUE} more are silent or stalled", "red")
    for alarm in status["alarms"]:
        yield from _wrapped(
            f"alarm of {alarm['group']} at step {alarm['step']}: {alarm['text']}", "yellow", width
        )
    for error in status["errors"][-_KEPT_ERRORS:]:
        text = f"{error['instance']}, {error['age_seconds']:.0f} s ago: {error['text']}"
        yield from _wrapped(text, "red", width)
    for columns in (
        _groups(status["groups"]),
        _targets(status["target"]["instances"]),
        _rings(status["rings"]),
        _workers(status["workers"]),
        _gpus(status["gpus"]),
        _evaluations(status["evaluations"][-_KEPT_EVALUATIONS:]),
    ):
        yield from _table(columns, width, most_blocks)


def _summary(status: Row, width: int) -> Iterator[Text]:
    run, groups, bottleneck = status["run"], status["groups"], status["bottleneck"]
    state = "bold red" if run["state"] == "failed" else "green" if status["is_ready"] else "yellow"
    total = status["target"]["total_rows"]
    drafted = sum(group["tokens_per_second"] for group in groups)
    yield Text.assemble(
        (plain(run["name"]), "bold"), " ", (run["state"], state),
        f" {rows_trained(status)}/{'?' if total is None else total} rows",
    )  # fmt: skip
    yield from _wrapped(
        f"target {number(status['target']['tokens_per_second'], 0)} tok/s, blocked "
        f"{share(bottleneck['blocked_share'])}; drafter {number(drafted, 0)} tok/s, starved "
        f"{share(bottleneck['starved_share'])}", "", width,
    )  # fmt: skip
    yield from _wrapped(f"bottleneck: {bottleneck['name']} - {bottleneck['reason']}", "dim", width)
    if (advice := bottleneck["advice"]) is not None:
        yield from _wrapped(advice["text"], "dim", width)
    if not status["is_ready"]:
        yield from _wrapped(f"not ready: {status['not_ready_reason']}", "yellow", width)


def _groups(groups: Sequence[Row]) -> list[Column]:
    skipped = [(group["account"] or {}).get("skipped") for group in groups]
    return [
        _column("group", 0, [group["group"] for group in groups]),
        _column("workers", 5, [group["num_live_workers"] for group in groups]),
        _column("step", 1, [group["step"] for group in groups]),
        _column("loss", 2, [number(group["loss"], 4) for group in groups]),
        _column("prefix", 6, [number(group["accepted_prefix_length"], 3) for group in groups]),
        _column("accepted", 3, [number(group["acceptance_length"], 3) for group in groups]),
        _column("best", 4, [number(group["best_acceptance_length"], 3) for group in groups]),
        _column("held out", 7, [number(g["held_out_acceptance_length"], 3) for g in groups]),
        _column("rows", 8, [group["trained_rows"] for group in groups]),
        _column("skipped", 9, [number(count, 0) for count in skipped]),
        _text("last checkpoint", 10, [group["last_checkpoint"] or "-" for group in groups]),
    ]


def _targets(views: Sequence[Row]) -> list[Column]:
    reports = [view["report"] or {} for view in views]
    return [
        _column("target", 0, [view["instance"] for view in views]),
        _column("phase", 1, map(_health, views)),
        _column("tok/s", 2, [number(r.get("tokens_per_second"), 0) for r in reports]),
        _column("blocked", 3, [share(view["blocked_share"]) for view in views]),
        _column("captured", 4, [number(r.get("captured_tokens"), 0) for r in reports]),
        _text("detail", 5, [view["detail"] for view in views]),
    ]


def _rings(rings: Sequence[Row]) -> list[Column]:
    return [
        _column("ring", 0, [ring["instance"] for ring in rings]),
        _column("slots", 1, [counts(ring["slots"]) for ring in rings]),
        _column("lease s", 2, [number(ring["oldest_lease_seconds"], 1) for ring in rings]),
        _text("transport", 3, [ring["transport"] for ring in rings]),
        _column("without a worker", 4, [
            ", ".join(map(absence, ring["absent_groups"])) or "-" for ring in rings
        ]),
        _column("MiB", 5, [number(ring["num_bytes"] / _MEBIBYTE, 1) for ring in rings]),
        _text("why", 6, [ring["transport_reason"] for ring in rings]),
    ]  # fmt: skip


def _workers(views: Sequence[Row]) -> list[Column]:
    # Who is in trouble comes first: the end of a long list may be cut.
    views = sorted(views, key=lambda view: view["condition"] in ("ok", "ended"))
    reports = [view["report"] or {} for view in views]
    walked = [(report.get("held_out") or [{}])[0] for report in reports]
    memory = [report.get("memory_bytes") for report in reports]
    return [
        _column("worker", 0, [view["instance"] for view in views]),
        _column("phase", 1, map(_health, views)),
        _column("step", 2, [number(report.get("step"), 0) for report in reports]),
        _column("loss", 3, [number(report.get("loss"), 4) for report in reports]),
        _column("tok/s", 4, [number(r.get("tokens_per_second"), 0) for r in reports]),
        _column("starved", 5, [share(view["starved_share"]) for view in views]),
        _column("ago s", 6, [number(r.get("last_step_age_seconds"), 1) for r in reports]),
        _column("held out", 8, [number(each.get("acceptance_length"), 3) for each in walked]),
        _column("step s", 7, [number(report.get("step_seconds"), 3) for report in reports]),
        _text("group", 9, [report.get("group", "-") for report in reports]),
        _text("GPU", 12, [report.get("gpu_uuid") or "-" for report in reports]),
        _column("MiB", 10, [number(m and m / _MEBIBYTE, 0) for m in memory]),
        _column("recompiles", 11, [number(report.get("recompiles"), 0) for report in reports]),
        _column("first s", 13, [number(r.get("seconds_to_first_step"), 1) for r in reports]),
        _text("detail", 14, [view["detail"] for view in views]),
    ]


def _gpus(places: Sequence[Row]) -> list[Column]:
    return [
        _column("GPU", 0, [place["uuid"] for place in places]),
        _text("has", 1, [holders(place) for place in places]),
        _column("free MiB", 2, [number(place["free_bytes"] / _MEBIBYTE, 0) for place in places]),
        _column("of MiB", 3, [number(place["total_bytes"] / _MEBIBYTE, 0) for place in places]),
        _text("name", 4, [place["name"] for place in places]),
    ]


def _evaluations(results: Sequence[Row]) -> list[Column]:
    return [
        _column("evaluated", 0, [result["group"] or "-" for result in results]),
        _column("step", 1, [result["step"] for result in results]),
        _column("accepted", 2, [number(result["acceptance_length"], 3) for result in results]),
        _column("speed-up", 3, [number(result["speedup"], 2) for result in results]),
        _column("replay", 4, [number(result["replay_acceptance_length"], 3) for result in results]),
        _text("arm", 5, [result["arm"] for result in results]),
        _column("temperature", 6, [f"{result['temperature']:g}" for result in results]),
    ]


def _column(head: str, rank: int, cells: Any) -> Column:
    return Column(head, rank, tuple(plain(str(cell)) for cell in cells))


def _text(head: str, rank: int, cells: Any) -> Column:
    return replace(_column(head, rank, cells), is_text=True)


def _table(columns: list[Column], width: int, most_blocks: int) -> Iterator[Text]:
    """Yield blocks of a head and a line for each row; nothing where there is no row."""
    num_rows = len(columns[0].cells)
    if not num_rows:
        return
    for block in _fitting(columns, width, most_blocks):
        yield Text("")
        yield Text(_GAP.join(_padded(column.head, column.width) for column in block), "dim")
        for row in range(num_rows):
            yield Text(_GAP.join(_padded(column.cells[row], column.width) for column in block))


def _fitting(columns: list[Column], width: int, most_blocks: int) -> list[list[Column]]:
    """Return one block without some texts, else as many as there may be without what has no room.

    Two columns stay in any case, and are cut.
    """
    kept = list(columns)
    while len(blocks := _blocks(kept, width)) > 1 and any(column.is_text for column in kept):
        kept.remove(_least(column for column in kept if column.is_text))
    if len(blocks) > 1:
        kept = list(columns)
        while len(blocks := _blocks(kept, width)) > most_blocks and len(kept) > 2:
            kept.remove(_least(kept))
    return [_named(block, width) for block in blocks]


def _blocks(columns: list[Column], width: int) -> list[list[Column]]:
    """Divide the columns, in their order, into blocks that fit; each begins with the name."""
    name, *others = columns
    start = min(name.width, _LEAST_NAME)
    blocks, used = [[name]], start
    for column in others:
        used += len(_GAP) + column.width
        if used > width and len(blocks[-1]) > 1:
            blocks.append([name])
            used = start + len(_GAP) + column.width
        blocks[-1].append(column)
    return blocks


def _least(columns: Iterable[Column]) -> Column:
    return max(columns, key=lambda column: (column.is_text, column.rank))


def _named(block: list[Column], width: int) -> list[Column]:
    """Shorten the names of a block to what the other columns leave."""
    name, *others = block
    room = width - sum(len(_GAP) + column.width for column in others)
    most = max(room, min(name.width, _LEAST_NAME))
    return [replace(name, cells=tuple(_shortened(cell, most) for cell in name.cells)), *others]


def _shortened(text: str, width: int) -> str:
    """Return a text with its end and its start, since names that are alike differ at their ends."""
    if cell_len(text) <= width:
        return text
    end = (width - 1) // 2
    return set_cell_size(text, width - 1 - end).rstrip() + _ELLIPSIS + _last_cells(text, end)


def _last_cells(text: str, width: int) -> str:
    return set_cell_size(text[::-1], width)[::-1].lstrip() if width else ""


def _padded(text: str, width: int) -> str:
    return text + " " * (width - cell_len(text))


def _wrapped(text: str, style: str, width: int) -> Iterator[Text]:
    """Yield a text's words on as many lines as they need."""
    line = ""
    for word in plain(text).split():
        if line and cell_len(f"{line} {word}") > width:
            yield Text(line, style)
            line = word
        else:
            line = f"{line} {word}" if line else word
    yield Text(line, style)


def _health(view: Row) -> str:
    return view["phase"] if view["condition"] == "ok" else f"{view['phase']} ({view['condition']})"


def plain(text: str) -> str:
    """Return a text with blanks for what a terminal would act on."""
    return "".join(character if character.isprintable() else " " for character in text)
