"""An order model beside the target gives the drafts that it gives beside the states."""

from __future__ import annotations

import pytest
import torch

from dlmgrid.workers.drafting.order_model import NUM_FEATURES, OrderModel
from dlmgrid.workers.drafting.placed_model import STATE_BUCKETS, PlacedModel


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def placed(request: pytest.FixtureRequest) -> tuple[PlacedModel, OrderModel]:
    torch.manual_seed(0)
    model = OrderModel().double().eval()
    here = OrderModel().double().eval()
    here.load_state_dict(model.state_dict())
    return PlacedModel(model, torch.device(request.param)), here


def test_scores_are_those_of_the_model_at_every_size(placed: tuple[PlacedModel, OrderModel]) -> None:
    there, here = placed
    generator = torch.Generator().manual_seed(1)
    for count in (1, 3, 3, 3, 20, 1, STATE_BUCKETS[-1] + 1):
        features = torch.rand(count, 8, NUM_FEATURES, generator=generator)
        present = torch.rand(count, 8, generator=generator) < 0.7
        present[:, 0] = True
        with torch.inference_mode():
            expected = here(features.double(), present)
        found = there(features, present)
        assert found.device.type == "cpu"
        torch.testing.assert_close(found[present], expected[present], rtol=1e-9, atol=1e-9)
