# SPDX-License-Identifier: Apache-2.0
"""Data whose actions do not fit what the weights or the training data have: what is said of them."""

import json
from pathlib import Path
from typing import Any

import attrs
import numpy
import pytest

from cosmos_predict2.actions.statistics import column_statistics, order_one_transform
from cosmos_predict2.checkpoints.card import TRANSFORM_KEY as KEY
from cosmos_predict2.data.action_conditioned.dataset_lerobot import LeRobotActionDataset
from cosmos_predict2.models.video2world_model import Video2WorldModel
from imaginaire.config.lazy_config import LazyCall as L
from tests.checkpoints.nets import transform_tensor
from tests.findings import checked_model
from tests.models.parts import NET
from tests.models.test_action_model import _saved, loss_of, make_config, make_model, proposed_batches


@pytest.mark.parametrize("where", ["resumed", "start weights"])
def test_data_in_other_units_than_the_weights_are_warned_of_before_the_first_step(
    where: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = numpy.linspace(-400, 400, 101)[:, None] * [1.0, 1.0, 1.0]
    own, half, tenth, metres = (
        attrs.evolve(order_one_transform(column_statistics(rows * factor)), proposed=True)
        for factor in (1, 0.4, 0.1, 1e-3)
    )
    before = make_model()
    loss_of(before, *proposed_batches(before, own))
    if where == "resumed":
        model = make_model()
        model.load_checkpoint_state(before.checkpoint_state())
    else:
        saved = before.actions.transform
        assert saved is not None
        model = make_model(dit_path=_saved(before.net, tmp_path / "mm.pt", **{KEY: transform_tensor(saved)}))
    proposed_batches(model, half, tenth)
    assert "other ranges" not in caplog.text, "ordinary differences, and few clips for validation that hardly move"
    proposed_batches(model, metres, metres)
    (told,) = [record for record in caplog.records if "other ranges" in record.message]
    assert told.levelname == "WARNING" and "number 0 in -0.392..0.392 (the weights: -392..392)" in told.message


def test_validation_data_are_at_fault_where_the_network_reads_what_training_has(tmp_path: Path) -> None:
    def data(width: int) -> dict[str, Any]:
        features = {"action": {"dtype": "float32", "shape": [width]}, "front": {"dtype": "video"}}
        info = dict(codebase_version="v3.0", fps=10, data_path="data/{episode_index}.parquet", features=features)
        (meta := tmp_path / str(width) / "meta").mkdir(parents=True)
        (meta / "info.json").write_text(json.dumps(info))
        text_width = NET["crossattn_emb_channels"]
        return dict(_target_=LeRobotActionDataset, root=str(meta.parent), text_width=text_width)

    three, four = data(3), data(4)
    config = L(Video2WorldModel)(config=make_config(), _recursive_=False)["config"]

    def wrong(training: Any, validation: Any) -> list[str]:
        found = checked_model(Video2WorldModel, config, [training], [validation])
        return [str(finding) for finding in found if finding.key.startswith("dataloader_val")]

    (problem,) = wrong(three, four)
    assert "4 numbers, but the network reads 3, as many as those of training" in problem
    assert "dataloader_val=lerobot_val" in problem and "run_validation=False" in problem and "=4" not in problem
    (problem,) = wrong(four, four)
    assert "net.action_dim=4" in problem, "the network is at fault"
    one, twenty = [{**three, "action_transform": dict(kind="controller", scale=[scale] * 3)} for scale in (1.0, 20.0)]
    (problem,) = wrong(one, twenty)
    assert "scale 20, but those of dataloader_train controller of 3 numbers, scale 1" in problem
    # the same, or one that takes that of the other
    assert wrong(one, one) == wrong(one, three) == wrong(three, twenty) == []
