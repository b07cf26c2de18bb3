"""What services load after their config is known to be good; imported by the fork server alone."""

import os

from common.lifecycle import heavy_imports

os.environ["HF_HUB_OFFLINE"] = "1"  # read when the hub's client is imported

with heavy_imports():
    import services.control_plane.server
    import services.drafter_worker.assemble
    import services.evaluator.evaluator
    import services.target_server.answered_rows
    import services.target_server.assemble
    import services.target_server.doctor
    import services.target_server.prepare_view
    import services.target_server.server_answers
    import services.target_server.target_answers  # noqa: F401
