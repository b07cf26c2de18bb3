"""The report of a dry pass, or of an estimate, as tables on stderr."""

from typing import Any

from rich.console import Console
from rich.table import Table

_BAR_WIDTH = 40
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def show(report: dict[str, Any]) -> None:
    """Print the report."""
    console = Console(stderr=True, highlight=False, markup=False)
    for table in (_summary(report), _histogram(report), _skipped(report), _bytes(report)):
        if table.row_count:
            console.print(table)


def show_estimate(found: dict[str, Any]) -> None:
    """Print what rows, rings and processes take."""
    table = _ring_bytes(found)
    table.add_row(f"/dev/shm, {found['rings']} rings" if found["rings"] > 1 else "/dev/shm",
                  f"{readable(found['shared_memory'])}; for containers SHM_SIZE={found['shm_size']}")  # fmt: skip
    for service, num_bytes in found["gpu"].items():
        table.add_row(f"a {service}'s GPU, about", readable(num_bytes))
    Console(stderr=True, highlight=False, markup=False).print(table)


def readable(num_bytes: float) -> str:
    """Return bytes in the unit that keeps the number small."""
    for unit in _UNITS:
        if num_bytes < 1024 or unit == _UNITS[-1]:
            break
        num_bytes /= 1024
    return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"


def _table(title: str, *heads: str) -> Table:
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for head in heads:
        table.add_column(head, overflow="fold")
    return table


def _summary(report: dict[str, Any]) -> Table:
    what = "prompts, answers not included" if report["source"] == "prompts" else "conversations"
    title = "one data epoch" if report["is_whole"] else "one data epoch, stopped early"
    table = _table(title, "", "")
    table.add_row(what, f"{report['samples']:,}")
    table.add_row("tokens", f"{report['tokens']:,}")
    table.add_row("supervised", f"{report['mask_coverage']:.1%} of tokens")
    table.add_row("cut answers", f"{report['cut_answers']:,}")
    table.add_row("rows", f"{report['rows']:,} of {report['row_tokens']} tokens, "
                          f"{report['documents_per_row']} documents each")  # fmt: skip
    table.add_row("rows are full to", f"{report['packing_efficiency']:.1%}")
    for name, key in (("length", "lengths"), ("supervised tokens", "supervised_tokens")):
        spread = " ".join(f"{at} {value}" for at, value in report[key].items())
        table.add_row(f"{name} of a sample", spread)
    for note, count in report["noted"].items():
        table.add_row(f"used, but {note}", f"{count:,}")
    return table


def _histogram(report: dict[str, Any]) -> Table:
    table = _table("lengths in tokens", "from", "to", "samples", "")
    most = max((part["samples"] for part in report["length_histogram"]), default=0)
    for part in report["length_histogram"]:
        bar = "#" * round(_BAR_WIDTH * part["samples"] / max(most, 1))
        table.add_row(str(part["from"]), str(part["to"]), f"{part['samples']:,}", bar)
    return table


def _skipped(report: dict[str, Any]) -> Table:
    table = _table("skipped", "reason", "count", "first")
    for reason, found in report["skipped"].items():
        table.add_row(reason, f"{found['count']:,}", ", ".join(found["first_ids"]))
    return table


def _bytes(report: dict[str, Any]) -> Table:
    table = _ring_bytes(report["bytes"])
    table.add_row("a data epoch, through the ring", readable(report["bytes"]["per_epoch"]))
    return table


def _ring_bytes(found: dict[str, Any]) -> Table:
    table = _table("bytes", "", "")
    table.add_row("kept layers", f"{found['target_layer_ids']}, {found['hidden_size']} wide, "
                                 f"{found['aux_dtype']}")  # fmt: skip
    table.add_row("a token", readable(found["per_token"]))
    table.add_row("a row (a slot)", readable(found["per_row"]))
    table.add_row("the ring", f"{readable(found['ring'])} in {found['num_slots']} slots")
    return table
