"""What another worker or target would give: the arithmetic, and what people read of it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.contracts.placement_messages import GpuClaim, GpuGrant, GpuRefusal
from services.control_plane.advice import Rate, advise
from services.control_plane.registry import Registry
from services.control_plane.view import build_status
from tests.heartbeats import RUN, beat, target_report, worker_report
from tests.seekers import GIB, gpu


def test_a_blocked_target_has_room_for_workers() -> None:
    """It made 200 a second and was blocked for 60 % of the time, so it can make 500."""
    advice = advise("drafter", [Rate(200, 0.6)], {"main": [Rate(100, 0), Rate(100, 0)]}, None)
    assert advice.tokens_per_second == 200
    assert advice.target_capacity == pytest.approx(500)
    assert advice.drafter_capacity == 200
    assert advice.with_another_worker == pytest.approx(300)
    assert advice.with_another_target == 200
    assert "another worker in group 'main': about 300 tokens/s, which are 200" in advice.text
    assert "the targets can make 500" in advice.text


def test_the_gain_ends_at_what_the_target_makes() -> None:
    advice = advise("drafter", [Rate(200, 0.2)], {"main": [Rate(200, 0.0)]}, None)
    assert advice.with_another_worker == pytest.approx(250)


def test_starved_workers_gain_nothing_of_another() -> None:
    advice = advise("target", [Rate(200, 0.0)], {"main": [Rate(100, 0.5), Rate(100, 0.5)]}, None)
    assert advice.drafter_capacity == 400
    assert advice.with_another_worker == 200
    assert advice.with_another_target == 400
    assert "another worker gives nothing" in advice.text
    assert "(target.replicas): about 400 tokens/s, which are 200" in advice.text


def test_the_slowest_group_holds_the_others() -> None:
    groups = {"slow": [Rate(100, 0.0)], "quick": [Rate(100, 1 / 3)]}
    advice = advise("drafter", [Rate(100, 0.9)], groups, None)
    assert advice.group == "slow"
    assert advice.with_another_worker == pytest.approx(150)  # then the other group is the slowest


def test_what_is_lost_on_the_way_stays_lost() -> None:
    """Both can do 400 and 200 come: half of it is expected of any other number of workers, too."""
    advice = advise("target", [Rate(200, 0.5)], {"main": [Rate(200, 0.5)]}, None)
    assert advice.with_another_worker == pytest.approx(200)
    text = advise("transport", [Rate(200, 0.5)], {"main": [Rate(200, 0.5)]}, None).text
    assert "another worker or target gives nothing" in text


def test_sides_that_are_even_gain_of_both_only() -> None:
    advice = advise("unknown", [Rate(200, 0.0)], {"main": [Rate(200, 0.0)]}, None)
    assert "add both" in advice.text


@pytest.mark.parametrize(
    ("place", "uuid", "said"),
    [
        (None, "", "It needs cores of its own"),
        (GpuGrant(gpu_uuid="GPU-0001"), "GPU-0001", "It would go to GPU-0001"),
        (GpuRefusal(reason="all are full"), "", "No GPU has a place for it: all are full"),
    ],
)
def test_it_says_where_the_worker_would_go(place, uuid: str, said: str) -> None:
    advice = advise("drafter", [Rate(200, 0.6)], {"main": [Rate(200, 0)]}, place)
    assert advice.worker_place == uuid
    assert said in advice.text


def test_without_both_sides_there_is_no_advice() -> None:
    assert advise("unknown", [], {"main": [Rate(1, 0)]}, None) is None
    assert advise("unknown", [Rate(1, 0)], {}, None) is None


RATES = st.lists(st.builds(Rate, st.floats(0, 1e6), st.floats(0, 1)), min_size=1, max_size=4)


@given(targets=RATES, groups=st.dictionaries(st.sampled_from("abc"), RATES, min_size=1))
def test_more_is_never_less_and_never_beyond_the_other_side(targets, groups) -> None:
    advice = advise("drafter", targets, groups, None)
    now = min(advice.tokens_per_second, advice.target_capacity, advice.drafter_capacity)
    slack = 1e-6 * (1 + now)
    assert advice.with_another_worker >= now - slack
    assert advice.with_another_target >= now - slack
    assert advice.with_another_worker <= advice.target_capacity + slack
    assert advice.with_another_target <= advice.drafter_capacity + slack


def test_it_goes_by_the_last_seconds_of_heartbeats() -> None:
    """A worker that trains 1000 tokens a second, beside a target that is blocked for three quarters."""
    clock = [0.0]
    registry = Registry(RUN, 0.5, lambda: clock[0])
    claim = GpuClaim(gpus=(gpu(0), gpu(1)), num_bytes=GIB, held="GPU-0000")
    for number in range(1, 22):
        clock[0] += 0.5
        tokens = number * 500
        made = target_report(captured_tokens=tokens, blocked_seconds=0.75 * clock[0])
        trained = worker_report(trained_tokens=tokens, starved_seconds=0.0)
        registry.take_heartbeat(beat("target_server", 1, number, report=made))
        registry.take_heartbeat(beat("drafter_worker", 2, number, report=trained, claim=claim))
    bottleneck = build_status(registry.snapshot(), RUN, "runs/demo").bottleneck
    assert bottleneck.name == "drafter"
    advice = bottleneck.advice
    assert advice.tokens_per_second == pytest.approx(1000)
    assert advice.target_capacity == pytest.approx(4000)
    assert advice.with_another_worker == pytest.approx(2000)
    assert advice.worker_place == "GPU-0001"
