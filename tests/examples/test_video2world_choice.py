# SPDX-License-Identifier: Apache-2.0
"""Which model a command of examples/video2world.py means: of Predict2, or of Predict2.5."""

from pathlib import Path
from typing import Any

import pytest
import torch

from cosmos_predict2.configs.base.config_predict2p5 import get_cosmos_predict2p5_video2world_pipeline
from examples.video2world import check_frames
from examples.video2world_choice import choose_model
from examples.video2world_flags import parse
from imaginaire.config.compose import compose
from imaginaire.config.lazy_config import instantiate, to_yaml
from imaginaire.errors import ConfigError

CONFIG = "cosmos_predict2/configs/base/config.py"
TWIN = "experiment=predict2p5_video2world_training_tiny_groot_gr1_480"


def chosen(*flags: str) -> Any:
    return choose_model(parse(list(flags)))


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A file of a tiny network, by itself."""
    net = instantiate(get_cosmos_predict2p5_video2world_pipeline(model_size="tiny").net)
    path = tmp_path_factory.mktemp("weights") / "model.pt"
    torch.save(net.state_dict(), path)
    return str(path)


def test_a_published_name_is_a_model_of_77_frames() -> None:
    choice = chosen("--model", "14B/pre-trained")
    assert choice.model_size == "14B" and choice.config.flow is not None and choice.config.state_t == 20
    assert choice.dit_path.endswith("54937b8c-29de-4f04-862c-e67b04ec41e8_ema_bf16.pt")
    assert "Reason1Encoder" in str(choice.config.text_encoder["_target_"])
    assert chosen("--model", "2B/post-trained", "--num_frames", "93").config.state_t == 24


def test_without_it_the_model_is_of_predict2() -> None:
    choice = chosen("--model_size", "2B")
    assert choice.config.flow is None and choice.config.state_t == 24
    assert chosen("--model_size", "tiny", "--num_frames", "9").config.state_t == 3


def test_weights_are_recognised_by_their_text_projection(weights: str) -> None:
    choice = chosen("--dit_path", weights)
    assert choice.model_size == "tiny" and choice.config.flow.shift == 8.0
    assert choice.config.net.crossattn_proj_in_channels == 64 and choice.config.state_t == 4


def test_released_weights_that_are_not_there_are_recognised_by_their_place() -> None:
    path = "checkpoints/nvidia/Cosmos-Predict2.5-2B/base/post-trained/81edfebe-bd6a-4039-8c1d-737df1a790bf_ema_bf16.pt"
    assert chosen("--dit_path", path).config.flow is not None
    path = "checkpoints/nvidia/Cosmos-Predict2.5-2B/base/distilled/575edf0f-d973-4c74-b52c-69929a08d0a5_ema_bf16.pt"
    with pytest.raises(ConfigError, match=r"2B/distilled is not yet here"):
        chosen("--dit_path", path)


@pytest.mark.slow  # for the composition of a run
def test_a_run_says_how_its_network_is_asked(tmp_path: Path) -> None:
    overrides = [TWIN, "model.config.pipe_config.flow.shift=3.0"]
    (tmp_path / "config.yaml").write_text(to_yaml(compose(CONFIG, overrides)))
    (tmp_path / "checkpoints/model").mkdir(parents=True)
    choice = chosen("--dit_path", str(tmp_path / "checkpoints/model/iter_000000010.pt"))
    assert choice.model_size == "tiny" and choice.config.flow.shift == 3.0
    assert choice.config.min_num_conditional_frames == 0 and choice.config.text_encoder["width"] == 64


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--model", "2B/post-trained", "--dit_path", "x.pt"], "both name weights"),
        (["--model", "2B/post-trained", "--model_size", "14B"], "is of a 2B model"),
        (["--model", "2B/post-trained", "--natten"], "natten"),
        (["--model", "2B/post-trained", "--resolution", "48"], "no variant"),
        (["--model_size", "tiny", "--num_frames", "8"], "1 \\+ 4k"),
    ],
)
def test_flags_that_do_not_go_together(flags: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        chosen(*flags)


def test_any_rate_can_be_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    for flags in (["--model_size", "tiny"], ["--model_size", "2B", "--random_weights"]):
        caplog.clear()
        config = chosen(*flags).config
        (state_t, fps), other = (config.state_t, config.fps), chosen(*flags, "--fps", "15").config
        assert (other.state_t, other.fps) == (state_t, 15)
        assert f"--fps 15 is the rate of the mp4: the weights make {fps:g} frames per second" in caplog.text
    assert chosen("--random_weights", "--fps", "10").config.state_t == 16  # the released model of this rate
    for rate in ("0", "nan", "x"):
        with pytest.raises(SystemExit):
            parse(["--fps", rate])


def test_inference_types_are_numbers_of_given_frames() -> None:
    assert [
        parse(["--inference_type", name]).num_conditional_frames
        for name in ("text2world", "image2world", "video2world")
    ] == [0, 1, 5]
    assert parse([]).num_conditional_frames == 1
    with pytest.raises(SystemExit):
        parse(["--inference_type", "text2world", "--num_conditional_frames", "5"])


def test_what_a_network_of_predict2_does_not_know_is_said() -> None:
    config = chosen("--model_size", "tiny").config
    with pytest.raises(ConfigError, match="--model 2B/post-trained"):
        check_frames(parse(["--num_conditional_frames", "0"]), config)
    with pytest.raises(ConfigError, match="take 2ab"):
        check_frames(parse(["--solver", "unipc"]), config)
