"""A socket that loses, repeats, reorders, delays, cuts and garbles: what it costs, and what not."""

import contextlib
import signal
import time
from collections.abc import Iterator

import pytest

from tests.ring_proxy import QUIET, SILENCE, Noise, Proxy
from tests.ring_scene import PATIENT, QUICK, ROWS, Scene, make_scene
from tests.rings import endpoint_in

# Several times what ends a lease and a session of the hasty run.
BLACKOUTS = [3.0, pytest.param(10.0, marks=pytest.mark.hammer)]
PATIENCE_SECONDS = 20.0
NOISE = Noise(lost=0.1, repeated=0.1, swapped=0.1, delayed=0.2, truncated=0.1)


@contextlib.contextmanager
def between(scene: Scene, noise: Noise = QUIET, seed: int = 0) -> Iterator[Proxy]:
    """Put a proxy into a scene's folder; workers reach it with `endpoint=front_of(scene)`."""
    front = scene.folder / "proxy.sock"
    with Proxy(front, endpoint_in(scene.folder), noise, seed) as proxy:
        yield proxy


def front_of(scene: Scene) -> str:
    return str(scene.folder / "proxy.sock")


@pytest.mark.parametrize("seconds", BLACKOUTS)
def test_a_time_without_a_message_costs_nothing_but_what_timed_out(seconds: float) -> None:
    """Two runs at once: in one of them, sessions outlive the silence; in the other, they do not."""
    rows = 60
    with contextlib.ExitStack() as stack:
        patient, hasty = (stack.enter_context(make_scene()) for _ in range(2))
        proxies = [stack.enter_context(between(scene)) for scene in (patient, hasty)]
        for scene, table in ((patient, PATIENT), (hasty, QUICK)):
            scene.start("owner", "owner", num_rows=rows, table=table)
            for name in ("one", "two"):
                scene.start("worker", name, row_seconds=0.02, endpoint=front_of(scene))
        for scene in (patient, hasty):
            scene.wait_for("one", "saved")
            scene.wait_for("two", "trained", 6)
        for proxy in proxies:
            proxy.noise = SILENCE
        time.sleep(seconds)
        for proxy in proxies:
            proxy.noise = QUIET
            assert proxy.counts["lost"] > 20
        for scene in (patient, hasty):
            scene.wait_for_end("owner", "one", "two")
            scene.assert_nothing_is_lost(num_rows=rows)
        assert (patient.account()["requeued"], patient.account()["recaptured"]) == (0, 0)
        assert patient.report()["reclaimed"] == {}
        assert set(patient.trained().values()) == {1}
        assert sum(hasty.report()["reclaimed"].values()) >= 1


SEEDS = [*range(3), *(pytest.param(seed, marks=pytest.mark.hammer) for seed in range(3, 40))]


@pytest.mark.parametrize("seed", SEEDS)
def test_a_noisy_socket_loses_no_row(scene: Scene, seed: int) -> None:
    with between(scene, NOISE, seed) as proxy:
        scene.start("owner", "owner", num_rows=ROWS)
        for name in ("one", "two"):
            scene.start("worker", name, commit_every=3, endpoint=front_of(scene))
        scene.wait_for_end("owner", "one", "two")
    scene.assert_nothing_is_lost()
    faults = ("lost", "repeated", "swapped", "delayed", "truncated")
    assert all(proxy.counts[fault] for fault in faults), proxy.counts


@pytest.mark.parametrize("seed", SEEDS)
def test_garbled_messages_end_no_owner_and_unbalance_no_account(scene: Scene, seed: int) -> None:
    """What is garbled and yet well formed is believed: a worker may stop, go early, or wait."""
    with between(scene, Noise(corrupted=0.15), seed) as proxy:
        scene.start("owner", "owner", num_rows=ROWS)
        for name in ("one", "two"):
            scene.start("worker", name, commit_every=3, endpoint=front_of(scene))
        for name in ("one", "two"):
            scene.names[name].join(PATIENCE_SECONDS)
            scene.signal(name, signal.SIGTERM)
            if scene.wait_for_exit(name) != 0:
                assert scene.log(name, "failed"), scene.errors(name)
        scene.signal("owner", signal.SIGTERM)
        scene.wait_for_end("owner")
    assert proxy.counts["corrupted"] > 0
