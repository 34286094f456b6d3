# SPDX-License-Identifier: Apache-2.0
"""Names that published examples, scripts, configurations and pages of Predict2 import: here, or refused with a cure.

`published_names.txt` has all of them, a module and a name in each line; it was collected from their import statements.
"""

import importlib
import json
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cosmos_predict2.compat.predict2 import CosmosT5TextEncoder, CosmosT5TextEncoderConfig
from cosmos_predict2.data.video import media
from imaginaire.renamed import NAMES
from tests.programs import finished, python

ROOT = Path(__file__).parents[1]
PUBLISHED = [tuple(line.split()) for line in (ROOT / "tests/published_names.txt").read_text().splitlines()]


def imported(module: str, name: str) -> Any:
    """As ``from module import name`` does."""
    found = importlib.import_module(module)
    return getattr(found, name) if hasattr(found, name) else importlib.import_module(f"{module}.{name}")


def test_each_published_name_is_here_or_refused_with_what_to_use() -> None:
    refused = []
    for module, name in PUBLISHED:
        try:
            imported(module, name)
        except ImportError as error:
            assert not isinstance(error, ModuleNotFoundError), (module, name)
            assert str(error).startswith(f"{module}.{name}: ") and "use " in str(error)
            refused.append(f"{module}.{name}")
    assert len(PUBLISHED) == 144
    assert len(refused) <= 19, refused


def test_every_place_of_the_table_is_there() -> None:
    for module, places in NAMES.items():
        for name, place in places.items():
            if " " not in place:
                assert imported(module, name) is not None, (module, name)


@pytest.mark.parametrize(
    "code",
    [
        "from imaginaire.utils import distributed, log, misc; from imaginaire.utils.io import save_image_or_video",
        "from imaginaire.lazy_config.lazy import LazyConfig; from imaginaire.constants import T5_MODEL_DIR",
        "from examples.video2world import setup_pipeline, process_single_generation",
    ],
)
def test_they_are_found_where_nothing_else_was_imported(code: str) -> None:
    run = finished(python(), "-c", code, cwd=ROOT)
    assert (run.returncode, run.stderr) == (0, "")


def test_other_names_are_unknown_as_anywhere() -> None:
    for module, name in (
        ("imaginaire.utils", "other"),
        ("imaginaire.utils.io", "other"),
        ("examples.video2world", "x"),
    ):
        with pytest.raises(ImportError) as raised:
            imported(module, name)
        assert "use " not in str(raised.value)
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("imaginaire.absent")


# What they do, by the calls of published code -------------------------------------------------------------------------


def test_a_program_written_for_the_published_functions_makes_its_video(tmp_path: Path) -> None:
    from examples.video2world import process_single_generation, setup_pipeline, validate_input_file
    from imaginaire.utils.io import save_image_or_video, save_text_prompts

    pipe = setup_pipeline(Namespace(model_size="tiny", dit_path="", load_ema=False, disable_guardrail=True))
    assert pipe.guardrail is None, "as the flag says"
    picture = str(ROOT / "assets/toy_world/first_frame.png")
    assert validate_input_file(picture, 1) and not validate_input_file(picture, 5)
    arguments: dict[str, Any] = dict(
        negative_prompt="", aspect_ratio="1:1", num_conditional_frames=1, guidance=0, seed=3
    )
    path = str(tmp_path / "a.mp4")
    assert process_single_generation(pipe=pipe, input_path=picture, prompt="push", output_path=path, **arguments)
    assert json.loads((tmp_path / "a.json").read_text())["seed"] == 3
    absent = str(tmp_path / "absent.png")
    assert not process_single_generation(pipe=pipe, input_path=absent, prompt="push", output_path=path, **arguments)
    video = pipe(picture, "push", aspect_ratio="1:1", num_sampling_step=2, guidance=0.0)
    save_image_or_video(video, str(tmp_path / "b.mp4"), fps=16)
    half = (video[:, :, :1].clamp(-1, 1) + 1) / 2  # in [0, 1], as a file may be read
    for name, first in (("b", video[:, :, :1]), ("half", half)):
        save_image_or_video(first, str(tmp_path / f"{name}.png"))
    same = [media.read_image(tmp_path / f"{name}.png").int() for name in ("b", "half")]
    assert (same[0] - same[1]).abs().max() <= 1
    save_text_prompts({"prompt": "push", "negative_prompt": "blur"}, str(tmp_path / "b.txt"))
    assert (tmp_path / "b.txt").read_text() == "[Prompt]\npush\n\n[Negative Prompt]\nblur\n\n"
    assert (tmp_path / "b.mp4").exists() and (tmp_path / "b.png").exists()


def test_functions_of_the_engine_do_what_their_names_say(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    from imaginaire.lazy_config.lazy import LazyConfig
    from imaginaire.utils import distributed, log, misc

    misc.set_random_seed(5)
    first = torch.rand(2)
    misc.set_random_seed(5, by_rank=True)
    assert torch.equal(first, torch.rand(2))
    with caplog.at_level("INFO"):
        log.success("100% done", rank0_only=False)
    assert "100% done" in caplog.text
    values = [1]
    distributed.broadcast_object_list(values)
    distributed.barrier()
    assert (distributed.get_rank(), distributed.get_world_size(), values) == (0, 1, [1])
    assert distributed.rank0_only(lambda: 3)() == 3
    LazyConfig.save_yaml({"a": 1}, str(tmp_path / "c.yaml"))
    assert (tmp_path / "c.yaml").read_text() == "a: 1\n"


def test_a_mask_of_text_has_each_token_that_is_not_empty() -> None:
    encoder: Any = CosmosT5TextEncoder.__new__(CosmosT5TextEncoder)
    encoder.config = CosmosT5TextEncoderConfig(num_tokens=4)
    encoder.encoder = SimpleNamespace(encode=lambda prompts: torch.tensor([[[1.0, 0], [0, 2], [0, 0], [0, 0]]]))
    embeddings, mask = encoder.encode_prompts(["push"], max_length=3, return_mask=True)
    assert embeddings.shape == (1, 3, 2) and mask.tolist() == [[True, True, False]]


def test_parts_of_configurations_are_built() -> None:
    from cosmos_predict2.conditioner import BooleanFlag, ReMapkey, TextAttr, VideoConditioner
    from cosmos_predict2.configs.base.config_video2world import ConditioningStrategy
    from cosmos_predict2.module.denoiser_scaling import RectifiedFlowScaling
    from imaginaire.constants import CosmosPredict2Video2WorldModelSize, get_cosmos_predict2_video2world_checkpoint

    made = VideoConditioner(
        fps=ReMapkey(output_key="fps", dropout_rate=0.0, dtype=None, input_key="fps"),
        text=TextAttr(input_key=["t5_text_embeddings"], dropout_rate=0.2),
        use_video_condition=BooleanFlag(output_key="use_video_condition", dropout_rate=0.1),
    )
    assert made.rates == {"fps": 0.0, "padding_mask": 0.0, "text": 0.2, "use_video_condition": 0.1}
    assert f"{ConditioningStrategy.FRAME_REPLACE}" == "frame_replace"
    c_skip, c_out, c_in, c_noise = RectifiedFlowScaling(1.0, 1.0)(torch.tensor([1.0]))
    assert [float(c) for c in (c_skip, c_out, c_in, c_noise)] == [0.5, -0.5, 0.5, 0.5]
    assert CosmosPredict2Video2WorldModelSize.__args__ == ("2B", "14B")
    path = get_cosmos_predict2_video2world_checkpoint(model_size="2B", resolution="480", fps=10, aspect_ratio="16:9")
    assert path.endswith("nvidia/Cosmos-Predict2-2B-Video2World/model-480p-10fps.pt")
