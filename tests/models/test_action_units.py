# SPDX-License-Identifier: Apache-2.0
"""Data whose actions do not fit what the weights or the training data have: what is said of them."""

from pathlib import Path

import attrs
import numpy
import pytest

from cosmos_predict2.checkpoints.action_transforms import KEY, transform_tensor
from cosmos_predict2.data.action_conditioned.statistics import column_statistics, order_one_transform
from tests.models.test_action_model import _saved, loss_of, make_model, proposed_batch


@pytest.mark.parametrize("where", ["resumed", "start weights"])
def test_data_in_other_units_than_the_weights_are_warned_of_before_the_first_step(
    where: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = numpy.linspace(-400, 400, 101)[:, None] * [1.0, 1.0, 1.0]
    own, half, metres = (
        attrs.evolve(order_one_transform(column_statistics(rows * factor)), proposed=True) for factor in (1, 0.4, 1e-3)
    )
    before = make_model()
    loss_of(before, proposed_batch(own))
    if where == "resumed":
        model = make_model()
        model.load_checkpoint_state(before.checkpoint_state())
    else:
        saved = before.action_transform
        assert saved is not None
        model = make_model(dit_path=_saved(before.net, tmp_path / "mm.pt", **{KEY: transform_tensor(saved)}))
    loss_of(model, proposed_batch(half))
    assert "other ranges" not in caplog.text, "ordinary differences"
    for _ in range(2):
        loss_of(model, proposed_batch(metres))
    (told,) = [record for record in caplog.records if "other ranges" in record.message]
    assert told.levelname == "WARNING" and "number 0 in -0.392..0.392 (the weights: -392..392)" in told.message
