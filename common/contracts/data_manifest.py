"""What a run trains on, as its directory tells every service of the run."""

from common.contracts.record import Record

DATA_MANIFEST = "data.json"


class DataSource(Record):
    """One file or folder of conversations."""

    path: str
    weight: float
    tag: int
    """Its number, which every document from it carries."""


class DataManifest(Record):
    """`data.json` of a run directory: written by a target server before its first row."""

    tags: tuple[str, ...]
    """The name of each tag, at its number."""
    sources: tuple[DataSource, ...]
