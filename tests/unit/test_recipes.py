"""Rows come fresh in order, again where the ring asks, and are kept until they are settled."""

from collections import deque
from types import SimpleNamespace

from services.target_server.recipes import RecipeBook


class Ledger:
    """The ring's answers, set by hand."""

    def __init__(self) -> None:
        self.held: set[int] = set()
        self.again: deque[int] = deque()
        self.below = 0

    def wants(self, sequence: int) -> bool:
        return sequence not in self.held

    def next_recapture(self) -> int | None:
        return self.again.popleft() if self.again else None

    def settled_below(self) -> int:
        return self.below


def make_book(count: int) -> tuple[RecipeBook, Ledger]:
    ledger = Ledger()
    rows = iter([SimpleNamespace(sequence=sequence) for sequence in range(count)])
    return RecipeBook(rows, ledger), ledger


def sequences(book: RecipeBook) -> list[int]:
    rows = iter(book.next_row, None)
    return [row.sequence for row in rows]


def test_rows_come_in_order_and_the_end_is_a_state() -> None:
    book, _ = make_book(3)
    assert not book.has_ended
    assert sequences(book) == [0, 1, 2]
    assert book.has_ended
    assert book.last_sequence == 2


def test_a_lost_row_comes_again_before_the_next_fresh_one() -> None:
    book, ledger = make_book(3)
    assert book.next_row().sequence == 0
    ledger.again.append(0)
    assert sequences(book) == [0, 1, 2]


def test_a_row_that_a_live_worker_holds_is_passed_over_and_can_still_come_again() -> None:
    book, ledger = make_book(3)
    ledger.held = {0, 1}
    assert book.next_row().sequence == 2
    ledger.again.append(1)
    assert book.next_row().sequence == 1


def test_settled_rows_are_forgotten() -> None:
    book, ledger = make_book(5)
    sequences(book)
    ledger.below = 4
    book.next_row()
    assert set(book._kept) == {4}
