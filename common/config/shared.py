"""Tables that more than one service reads."""

import math
import re
from pathlib import Path
from typing import Annotated, Any, Literal, cast

from pydantic import AfterValidator, BeforeValidator, Field, field_validator, model_validator

from common.config.addresses import IPC, is_loopback, split_address
from common.config.loading import Table
from common.config.own_tables import OWN_TABLES
from common.contracts.ring_messages import Seconds

# A UNIX socket's path has at most 107 bytes; the longest name in a run directory is this long.
_LONGEST_SOCKET_NAME = len("/target-99.sock")


def _short_enough(directory: Path) -> Path:
    length = len(str(directory.absolute()).encode()) + _LONGEST_SOCKET_NAME
    if length > 107:
        raise ValueError(
            f"its sockets would have paths of {length} bytes, expected at most 107; "
            f"choose a shorter run.directory"
        )
    return directory


def _plain_name(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,39}", name):
        raise ValueError(
            f"got {name!r}, expected 1 to 40 letters, digits, dots, dashes, underscores, no dot first"
        )
    return name


Sync = Literal["none", "local_sgd", "allreduce"]
RunDirectory = Annotated[Path, AfterValidator(_short_enough)]


class RunTable(Table):
    """[run]: identity and place of a run."""

    name: Annotated[str, AfterValidator(_plain_name)] = "run"
    """Name of the run; part of the names of its segments."""
    directory: RunDirectory = Path("runs/run")
    """Where sockets, logs, metrics, checkpoints and evaluations go."""
    seed: int = 0
    """Seed of data order, anchors and initial weights."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Where target and drafter run."""
    num_threads: int = Field(default=0, ge=0)
    """CPU threads of each target server, worker and `regenerate`; 0 lets torch decide."""
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    """Least severe level that is written to the logs."""

    @property
    def training_ended(self) -> Path:
        """File that the launcher makes when the last worker has ended: no checkpoint will follow."""
        return self.directory / ".training-ended"


class TargetTable(Table):
    """[target]: the frozen model whose distribution the drafter learns."""

    model: str
    """A model folder, a GGUF file, or a hub id that is in the local cache."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Element type of the target's weights."""
    target_layer_ids: tuple[int, ...] = ()
    """0-based decoder layers whose output is kept; empty: `num_aux_layers` spread evenly."""
    num_aux_layers: int = Field(default=5, ge=1)
    """How many layers to keep where `target_layer_ids` is empty."""
    last_hidden_states_normed: bool = False
    """Whether rows also carry the target's last hidden states behind its final norm, 2 bytes times its
    hidden size a token: a drafter.loss against the target's distribution needs them."""
    chat_template_kwargs: dict[str, Any] = {}
    """Arguments of the chat template, such as enable_thinking; today = "2025-01-31" is the day that
    templates show which ask for it, 2025-01-01 where it is not given: rows must not change overnight."""
    mask_token_id: int = -1
    """Token id of the drafter's mask slots; -1: the first row behind the tokenizer's last id."""
    allow_untested_target: bool = False
    """Whether a target whose family no test covers may be used."""
    replicas: int = Field(default=1, ge=1, le=64)
    """Target servers of the run, each with a ring of its own and its share of the rows."""


class RingTable(Table):
    """[ring]: the ring between a target server and its workers."""

    transport: Literal["auto", "host", "cuda_ipc"] = "auto"
    """Where slots live; auto chooses and says why in /status."""
    aux_dtype: Literal["bf16", "fp8"] = "bf16"
    """Element type of hidden states in rows; fp8 halves their bytes and costs some accuracy."""
    address: str = IPC
    """`ipc`: sockets in the run directory; `tcp://host:port`: ports of this machine from that one
    on, one a target server. Beyond loopback only with `curve_directory`."""
    curve_directory: Path | None = None
    """Keys of the ring's TCP sockets (docs/ring-protocol.md, Sockets)."""
    num_slots: int = Field(default=8, ge=1, le=4096)
    """Depth of each ring."""
    capacity: int = Field(default=2, ge=1, le=64)
    """Rows of each ring that a worker can hold at once: its staging buffers, so many a target."""
    high_watermark: float = Field(default=1.0, gt=0, le=1)
    """Filled part of the ring at which the target stops and waits."""
    low_watermark: float | None = Field(default=None, ge=0, lt=1)
    """Filled part down to which it waits then; not set: until the ring is below the high one."""
    heartbeat_seconds: Seconds = 0.5
    """Interval of a session's heartbeats."""
    session_timeout_seconds: Seconds = 10.0
    """Silence after which a session is dead."""
    lease_seconds: Seconds = 10.0
    """A lease that no heartbeat renews for this long expires."""
    lease_max_seconds: Seconds = 60.0
    """A lease is never renewed past this age."""
    max_attempts: int = Field(default=3, ge=1, le=10_000)
    """Deliveries of a row to a group before it is poison."""
    resume_wait_seconds: float = Field(default=5.0, ge=0, le=86_400.0)
    """How long a dead session's rows wait for its successor before they are captured again, and a
    restarted target for workers to say what they hold: a worker that is later, which 0 makes of all, may
    find rows of its own at another one, to be trained twice."""
    checksum_payload: bool = False
    """Whether each slot's payload carries an xxh3 checksum that readers verify."""

    @property
    def watermark_slots(self) -> tuple[int, int]:
        """The high and the low watermark in slots, the low one below the high one."""
        # Rounded first: 0.1 of 30 slots is 3 of them, not a little more.
        high = max(1, math.ceil(round(self.high_watermark * self.num_slots, 6)))
        if self.low_watermark is None:
            return high, high - 1
        return high, min(high - 1, math.floor(round(self.low_watermark * self.num_slots, 6)))

    @model_validator(mode="after")
    def _watermarks_agree(self) -> "RingTable":
        if self.low_watermark is not None and self.low_watermark >= self.high_watermark:
            raise ValueError(
                f"low_watermark got {self.low_watermark}, expected less than high_watermark "
                f"{self.high_watermark}: the target waits from the high one down to the low one"
            )
        return self

    @model_validator(mode="after")
    def _address_is_safe(self) -> "RingTable":
        if self.address == IPC:
            if self.curve_directory is not None:
                raise ValueError(
                    f"curve_directory {str(self.curve_directory)!r} is for address = 'tcp://...', "
                    f"got 'ipc': its sockets are their owner's alone without keys"
                )
            return self
        host, _ = split_address(self.address)
        if self.curve_directory is None and not is_loopback(host):
            raise ValueError(
                f"address {self.address!r} is not on loopback, where whoever reaches it could take "
                f"leases: set curve_directory (docs/ring-protocol.md, Sockets), or address to 'ipc' "
                f"or 'tcp://127.0.0.1:<port>'"
            )
        return self

    @model_validator(mode="after")
    def _times_agree(self) -> "RingTable":
        if min(self.lease_seconds, self.session_timeout_seconds) < 2 * self.heartbeat_seconds:
            raise ValueError(
                f"lease_seconds {self.lease_seconds} and session_timeout_seconds "
                f"{self.session_timeout_seconds} must be at least twice heartbeat_seconds "
                f"{self.heartbeat_seconds}: a heartbeat renews them, and one may be late"
            )
        if self.lease_max_seconds < self.lease_seconds:
            raise ValueError(
                f"lease_max_seconds got {self.lease_max_seconds}, expected at least lease_seconds "
                f"{self.lease_seconds}: its first renewal would end a lease that is being copied, "
                f"and spend an attempt of its row; raise lease_max_seconds"
            )
        return self


class GroupTable(Table):
    """[groups.<name>]: one drafter under training."""

    workers: int = Field(default=0, ge=0, le=64)
    """Workers that `ringdraft up` starts for it; 0: launcher.workers."""
    drafter: dict[str, Any] = {}
    """Keys of [drafter] that the group has otherwise than the run."""
    optimizer: dict[str, Any] = {}
    """The same of [optimizer]."""
    training: dict[str, Any] = {}
    """The same of [training]."""

    policy: Literal["wait", "skip"] = "wait"
    """What happens to a row that the group does not take in time."""
    group_timeout_seconds: float = Field(default=60.0, gt=0)
    """How long `skip` waits for the group."""
    detach_after_seconds: float = Field(default=0.0, ge=0)
    """How long the group may be without a worker, while another group is served, before rows are
    skipped for it at once; 0: for ever."""
    sync: Sync = "none"
    """How the group's workers agree: `none`, each trains a drafter of its own; `local_sgd`, weights are
    averaged every `sync_steps`; `allreduce`, each step has the gradients of all. Both need torchft."""
    sync_steps: int = Field(default=50, ge=1)
    """Optimizer steps of a worker between two averages of `local_sgd`."""
    sync_wait_seconds: float = Field(default=2.0, gt=0, le=86_400)
    """How long a worker waits for a row before it meets the others without one."""
    sync_lease_seconds: float = Field(default=5.0, ge=0.5, le=86_400)
    """Silence after which a worker is no member: a dead or stopped one holds the others up so long."""
    sync_patience_seconds: float = Field(default=60.0, gt=0, le=86_400)
    """How long the others wait at a meeting for a worker that lives and does not come."""
    sync_transfer_seconds: float = Field(default=15.0, gt=0, le=86_400)
    """How long one exchange may take before the members are counted again."""

    @model_validator(mode="before")
    @classmethod
    def _reads_the_rows_of_all(cls, values: Any) -> Any:
        if isinstance(values, dict) and (shared := {"target", "data", "ring"} & set(values)):
            raise ValueError(
                f"got {sorted(shared)} of its own: every group reads the same rows of one target, "
                f"with the same target_layer_ids; a group may have tables {list(OWN_TABLES)}, "
                f"another target needs another run"
            )
        return values

    @field_validator("training")
    @classmethod
    def _does_not_name_itself(cls, training: dict[str, Any]) -> dict[str, Any]:
        if "group" in training:
            raise ValueError("got 'group', which a worker is told: the table's own name is it")
        return training

    @model_validator(mode="after")
    def _times_of_sync_agree(self) -> "GroupTable":
        if self.sync_patience_seconds < 2 * self.sync_wait_seconds:
            raise ValueError(
                f"sync_patience_seconds got {self.sync_patience_seconds}, expected at least twice "
                f"sync_wait_seconds {self.sync_wait_seconds}: a worker without rows comes late"
            )
        return self

    @property
    def is_synced(self) -> bool:
        """Whether the group has one drafter, whoever trains it."""
        return self.sync != "none"


def _existing_file(path: Path) -> Path:
    if not path.is_file():
        raise ValueError(f"{str(path)!r}: no such file; give JSONL files of prompts")
    return path


class HeldOutTable(Table):
    """[held_out]: prompts that the target answers before the run, to measure acceptance on."""

    prompts: tuple[Annotated[Path, AfterValidator(_existing_file)], ...] = ()
    """JSONL files that nobody trains on; each one's name is the tag of its prompts. Empty: none."""
    max_prompts: int = Field(default=64, ge=1)
    """Prompts of each file, from its start."""
    max_new_tokens: int = Field(default=256, ge=2)
    """Tokens at which an answer is cut."""
    steps: int = Field(default=200, ge=1)
    """Optimizer steps between two measures; there is one at step 0, and one at the end."""


def _host_name(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9_]([A-Za-z0-9._-]*[A-Za-z0-9_])?", name):
        raise ValueError(
            f"got {name!r}, expected a host's name without scheme, port or '*', such as 'train.lan'"
        )
    return name


class ControlPlaneTable(Table):
    """[control_plane]: HTTP address and heartbeats."""

    host: str = "127.0.0.1"
    """Address to bind."""
    port: int = Field(default=8765, ge=0, le=65535)
    """HTTP port; where it is not set and taken, any other, as with 0: `<run_dir>/control.json` names it."""
    allowed_hosts: tuple[Annotated[str, AfterValidator(_host_name)], ...] = ()
    """Names under which HTTP clients may ask for it, beside `host`, this machine's, loopback's and any
    number: of a proxy, or of a container as others call it. Under other names a web page could read it."""
    heartbeat_seconds: float = Field(default=0.5, gt=0)
    """Interval of the services' heartbeats to the control plane."""


def _gpu_name(name: Any) -> int | str:
    is_index = isinstance(name, int) and not isinstance(name, bool) and name >= 0
    if is_index or (isinstance(name, str) and re.fullmatch(r"(GPU|MIG)-[0-9A-Za-z/-]+", name)):
        return cast("int | str", name)
    raise ValueError(
        f"got {name!r}, expected a GPU's index or UUID as `nvidia-smi -L` shows them, such as 0 or "
        f"'GPU-8f6a...'"
    )


class PlacementTable(Table):
    """[placement]: which GPU each target server, worker and evaluator takes, where run.device is cuda.

    A GPU in MIG mode is no place, each of its MIG devices is one. CUDA_VISIBLE_DEVICES of a process
    says which of them it may take.
    """

    workers_per_gpu: int = Field(default=0, ge=0, le=64)
    """Most workers on one GPU; 0: as many as fit by their estimated bytes."""
    reserved_for_targets: tuple[Annotated[int | str, BeforeValidator(_gpu_name)], ...] = ()
    """GPUs that only target servers take, by index or UUID as `nvidia-smi -L` shows them; they take
    these first."""
    check_memory: bool = True
    """Whether a GPU must have free what the process is estimated to take."""
    wait_seconds: float = Field(default=30.0, ge=0, le=86_400)
    """How long a process waits for a place before it gives up; an evaluator that follows the run
    waits as long as the run lasts."""


Groups = Annotated[
    dict[Annotated[str, Field(pattern=r"^[A-Za-z0-9_-][A-Za-z0-9._-]{0,39}$")], GroupTable],
    Field(min_length=1),
]
