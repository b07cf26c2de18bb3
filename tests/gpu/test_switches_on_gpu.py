"""Compiled or not, captured or not: the same losses on the same rows."""

import itertools

import pytest
import torch

from tests.gpu.test_step_on_gpu import make_stepper, spec_for, train

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
    pytest.mark.timeout(600),
    # torch's own, where Inductor is loaded.
    pytest.mark.filterwarnings("ignore:.*script_method.*:DeprecationWarning"),
]
NUM_STEPS = 20
TOLERANCE = {torch.float32: 2e-3, torch.bfloat16: 5e-2}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("kind", ["full", "sliding"])
def test_all_four_settings_of_the_switches_give_the_same_losses(
    kind: str, dtype: torch.dtype
) -> None:
    spec = spec_for(kind)
    losses, replays = {}, {}
    for switches in itertools.product((False, True), repeat=2):
        compiled, captured = switches
        stepper = make_stepper(spec, dtype, "blocks", compiled, captured=captured)
        losses[switches] = train(stepper, spec, dtype, NUM_STEPS)
        replays[switches] = stepper.num_graph_replays
    plain = losses[False, False]
    assert plain[-1] != plain[0], "nothing was trained"
    for switches, got in losses.items():
        torch.testing.assert_close(got, plain, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
        assert replays[switches] == (2 * NUM_STEPS if switches[1] else 0)


def test_warm_up_of_a_captured_eager_step_leaves_the_weights_alone() -> None:
    spec = spec_for("full")
    stepper = make_stepper(spec, torch.float32, "blocks", False, captured=True)
    untouched = make_stepper(spec, torch.float32, "blocks", False)
    pairs = zip(stepper.optimizer.masters, untouched.optimizer.masters, strict=True)
    assert all(torch.equal(got, want) for got, want in pairs)
    assert stepper.optimizer.num_skipped.item() == 0
