"""`python -m services.target_server.estimate`: bytes of rows, rings and processes on GPUs, before a start.

By the config of run, target and drafter alone: no weights, no data are read. People read stderr; stdout gets one
JSON line, whose `shm_size` is what a container engine is told.
"""

import json
import sys
import threading
from typing import Any, Protocol

from common.config.command_line import parse
from common.config.loading import Table
from common.config.shared import RingTable, RunTable, TargetTable
from common.contracts.control_messages import ServiceKind
from common.contracts.rows import AuxDtype, RowSchema
from common.drafters.dflash.config import DrafterTable
from common.drafters.dflash.footprint import worker_bytes
from common.lifecycle import run_service
from common.ring.layout import SlotLayout
from common.target.footprint import RUNTIME_BYTES, measure_target
from common.telemetry import logs
from services.target_server.data_config import DataTable

_MEBIBYTE = 1 << 20
# For what else a process may put into /dev/shm.
_MARGIN_BYTES = 64 * _MEBIBYTE


class EstimateConfig(Table):
    """What `python -m services.target_server.estimate` reads."""

    run: RunTable = RunTable()
    target: TargetTable
    data: DataTable
    ring: RingTable = RingTable()
    drafter: DrafterTable = DrafterTable()


class RowConfig(Protocol):
    """The tables that rows follow from."""

    @property
    def target(self) -> TargetTable:
        """[target]."""

    @property
    def data(self) -> DataTable:
        """[data]."""

    @property
    def ring(self) -> RingTable:
        """[ring]."""


def row_bytes(config: RowConfig) -> dict[str, Any]:
    """Return what rows and a ring of them take, in bytes, by the target's config alone."""
    # Imported here: it loads torch, which `--dry-run` does not need.
    from common.target.loading import describe_target, resolve_target_layer_ids

    target = describe_target(config.target)
    layer_ids = resolve_target_layer_ids(config.target, target.num_layers)
    dtype: AuxDtype = "float8_e4m3fn" if config.ring.aux_dtype == "fp8" else "bfloat16"
    schema = RowSchema(
        row_tokens=config.data.row_tokens, max_documents=config.data.max_documents,
        hidden_size=target.hidden_size, target_layer_ids=layer_ids, aux_dtype=dtype,
        has_last_hidden_states_normed=config.target.last_hidden_states_normed, target_fingerprint="",
        template_fingerprint="", feature_engine="",
    )  # fmt: skip
    slot_bytes = SlotLayout(schema).slot_bytes
    return {
        "target_layer_ids": list(layer_ids),
        "hidden_size": target.hidden_size,
        "aux_dtype": dtype,
        "per_token": round(slot_bytes / config.data.row_tokens, 1),
        "per_row": slot_bytes,
        "ring": slot_bytes * config.ring.num_slots,
        "num_slots": config.ring.num_slots,
    }


def target_bytes(config: RowConfig) -> int:
    """Return what a target server's GPU holds: weights, a ring that may be there, a row on its way.

    The embedding and head that start-up checks read are gone before the ring comes.
    """
    size, num_tokens = measure_target(config.target), config.data.row_tokens
    row = size.row_bytes(num_tokens)
    ring = 0 if config.ring.transport == "host" else config.ring.num_slots * row
    rows = ring + 2 * row + size.layer_bytes(num_tokens)
    return size.weight_bytes + max(size.table_bytes, rows) + RUNTIME_BYTES


def gpu_bytes(config: EstimateConfig) -> dict[ServiceKind, int]:
    """Return what each kind of process takes of a GPU, which is what places are chosen by."""
    size = measure_target(config.target)
    return {
        "target_server": target_bytes(config),
        "drafter_worker": worker_bytes(config.drafter, size),
        "evaluator": size.weight_bytes + RUNTIME_BYTES,
    }


def estimate(config: EstimateConfig) -> dict[str, Any]:
    """Return `row_bytes`, `gpu_bytes`, and the shared memory of all rings where they are no GPU's."""
    found = row_bytes(config)
    rings = found["ring"] * config.target.replicas
    mebibytes = -(-(rings + _MARGIN_BYTES) // _MEBIBYTE)
    return {
        **found,
        "rings": config.target.replicas,
        "shared_memory": rings,
        "shm_size": f"{mebibytes}m",
        "gpu": gpu_bytes(config),
    }


def main(stop: threading.Event) -> None:  # noqa: ARG001 - it is done in a moment
    """Estimate by the command line."""
    config = parse(EstimateConfig, "target_server.estimate")
    if config is None:
        return
    logs.configure("estimate", "0", config.run.name, config.run.log_level)
    found = estimate(config)
    from services.target_server.prepare_view import show_estimate

    show_estimate(found)
    print(json.dumps(found), flush=True)  # noqa: T201


if __name__ == "__main__":
    sys.exit(run_service(main))
