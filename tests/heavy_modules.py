"""What services load after their config is known to be good; imported by the fork server alone."""

import gc
import os

# Read when the hub's client is imported.
os.environ["HF_HUB_OFFLINE"] = "1"
gc.disable()

import fastapi  # noqa: E402, F401
import uvicorn  # noqa: E402, F401

import services.drafter_worker.assemble  # noqa: E402
import services.evaluator.evaluator  # noqa: E402
import services.target_server.answered_rows  # noqa: E402
import services.target_server.assemble  # noqa: E402
import services.target_server.prepare_view  # noqa: E402
import services.target_server.server_answers  # noqa: E402
import services.target_server.target_answers  # noqa: E402, F401

# The children's collections leave alone, and so share, what is loaded here.
gc.freeze()
gc.enable()
