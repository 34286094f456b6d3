# SPDX-License-Identifier: Apache-2.0
"""A prompt reaches the network as the captions of its training did, or it is an error."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from cosmos_predict2.checkpoints.card import read_card
from cosmos_predict2.checkpoints.export import Export, export
from cosmos_predict2.conditioner import NEGATIVE_TEXT_KEY, TEXT_KEY
from cosmos_predict2.configs.base.config_video2world import choose_model, get_cosmos_predict2_video2world_pipeline
from cosmos_predict2.data.action_conditioned.dataset_lerobot import LeRobotActionDataset
from cosmos_predict2.data.dataset_video import Dataset
from cosmos_predict2.data.mock import MockVideos
from cosmos_predict2.data.toy.videos import ToyWorldVideos
from cosmos_predict2.models.text import TrainingTextConfig, data_text, data_text_problems, text_of_config
from cosmos_predict2.pipelines.recorded_run import apply_card
from cosmos_predict2.pipelines.video2world import Video2WorldPipeline
from cosmos_predict2.text.bytes_encoder import BytesEncoder
from cosmos_predict2.text.embeddings.encode import embed_captions
from cosmos_predict2.text.embeddings.folder import EmbeddingFolder
from cosmos_predict2.text.prompt_embeddings import write_prompt_embeddings
from cosmos_predict2.text.trained_text import (
    TrainedText,
    encode_command,
    encode_commands,
    is_same_encoder,
    other_text,
    parse_name,
    with_tokens,
)
from cosmos_predict2.world_model.assembly import with_trained_text
from cosmos_predict2.world_model.options import VideoModel
from cosmos_predict2.world_model.world_model import SamplingOptions
from examples.video2world import parse, prepare
from imaginaire.config.compose import compose
from imaginaire.config.lazy_config import LazyCall as L
from imaginaire.config.lazy_config import instantiate, to_yaml
from imaginaire.data.facts import DataFacts
from imaginaire.errors import ConfigError
from imaginaire.training import preflight, provenance
from scripts import get_t5_embeddings
from tests.data.video_files import write_clip
from tests.findings import problems

CAPTION = "a box slides to the right over a dark table, and nothing else in the whole scene moves"  # above 63 bytes
PROMPT = "a box slides to the right over a bright table, and nothing else in the whole scene moves"
FOLDER = "dataloader_train.dataset"
TEXTS = (TEXT_KEY, NEGATIVE_TEXT_KEY)


def _run(folder: Path, encoder_tokens: int, *overrides: str) -> tuple[str, Any]:
    """A run of the tiny model on a folder of clips, as far as its start: where its weights lie, and its data set."""
    data = folder / "data"
    write_clip(data / "videos/a.mp4", 13)
    embed_captions(data / "t5_xxl", {"a": CAPTION}, BytesEncoder(encoder_tokens, 64))
    config = compose(
        "cosmos_predict2/configs/base/config.py",
        [
            "experiment=predict2_video2world_training_tiny_video2world_data",
            "dataloader_train=folder",
            f"{FOLDER}.dataset_dir={data}",
            f"{FOLDER}.video_size=[48,48]",
            f"{FOLDER}.text_encoder=bytes",
            "model.config.pipe_config.net.num_blocks=1",
            *overrides,
        ],
    )
    run = folder / "run"
    (run / "checkpoints/model").mkdir(parents=True)
    (run / "config.yaml").write_text(to_yaml(config))
    model = instantiate(config.model)
    provenance.add_start(str(run), model.data_facts(preflight.data_sets(config.dataloader_train)))
    path = run / "checkpoints/model/iter_000000001.pt"
    torch.save(model.checkpoint_state(), path)
    return str(path), instantiate(config.dataloader_train.dataset)


@pytest.fixture(scope="module")
def run_of_512(tmp_path_factory: pytest.TempPathFactory) -> str:
    return _run(tmp_path_factory.mktemp("run"), 512)[0]


def _bare_run(folder: Path, starts: str) -> str:
    """A run of which nothing is left but its record."""
    (folder / "config.yaml").write_text("job: {name: x}\n")
    (folder / "runs.jsonl").write_text(starts)
    return str(folder / "model.pt")


@pytest.mark.parametrize(
    ("encoder_tokens", "overrides"),
    [(512, []), (64, []), (512, [f"{FOLDER}.num_tokens=64"])],
    ids=["as they are", "padded", "cut"],
)
def test_a_caption_of_the_training_is_the_same_text_at_inference(
    encoder_tokens: int, overrides: list[str], tmp_path: Path
) -> None:
    """Whoever asks: the command line, by the run's numbers, or Python, by the weights' path alone."""
    path, dataset = _run(tmp_path, encoder_tokens, *overrides)
    config = get_cosmos_predict2_video2world_pipeline(model_size="tiny")
    apply_card(read_card(path), config)
    own = get_cosmos_predict2_video2world_pipeline(model_size="tiny")
    own.net = config.net
    pipes = [Video2WorldPipeline.from_config(one, path, device="cpu") for one in (config, own)]
    assert own.num_text_tokens is None, "a config that the caller holds is not changed"
    trained = dataset[0]["t5_text_embeddings"]
    given: list[torch.Tensor] = []
    for pipe in pipes:
        pipe.world.generate_latents = lambda batch, *_, **__: given.extend(batch[key] for key in TEXTS)  # type: ignore
        pipe.world.decode = lambda latent: latent  # type: ignore[method-assign]
        text = pipe.world.encode_text([CAPTION])
        pipe.generate(
            torch.zeros(1, 3, 1, 48, 48, dtype=torch.uint8), text, text, options=SamplingOptions(guidance=7.0)
        )
    assert len(given) == 4 and all(torch.equal(text[0], trained) for text in given)


@pytest.mark.parametrize("form", ["pt", "safetensors", "diffusers"])
def test_an_export_is_configured_as_its_run(form: str, run_of_512: str, tmp_path: Path) -> None:
    """Also its text, frame rate and crop, which only the run's folder records."""
    export(Export(run_of_512, str(tmp_path / f"exported.{form}"), form))
    configs = [choose_model(VideoModel(dit_path=path)).config for path in (run_of_512, f"{tmp_path}/exported.{form}")]
    assert to_yaml(configs[0]) == to_yaml(configs[1])
    assert (configs[1].text_encoder.num_tokens, configs[1].fps, configs[1].input_crop) == (512, 20, "stretch")


def test_adapters_were_trained_last_and_their_text_counts(run_of_512: str, tmp_path: Path) -> None:
    later = dict(encoder="bytes-v1-64x64", encoder_tokens=64, num_tokens=64, width=64)
    adapter = _bare_run(tmp_path, json.dumps({"text": [later]}))
    config = choose_model(VideoModel(model_size="tiny", dit_path=run_of_512, lora=[f"{adapter}:0.5"])).config
    assert (config.text_encoder.num_tokens, config.num_text_tokens) == (64, 64)
    own = with_trained_text(get_cosmos_predict2_video2world_pipeline(model_size="tiny"), [run_of_512, adapter])
    assert own.num_text_tokens == 64, "from Python, too"


def test_embeddings_of_a_prompt_are_those_of_the_run_or_an_error(run_of_512: str, tmp_path: Path) -> None:
    picture = str(Path(__file__).parent.parent.parent / "assets/toy_world/first_frame.png")

    def check(encoder: BytesEncoder, prompt: str) -> None:
        write_prompt_embeddings(tmp_path / "prompt.safetensors", encoder, [prompt])
        flags = ["--model_size", "tiny", "--dit_path", run_of_512, "--prompt", prompt, "--input_path", picture]
        flags += ["--prompt_embeddings", str(tmp_path / "prompt.safetensors"), "--save_path", str(tmp_path / "o.mp4")]
        prepare(parse(flags))

    check(BytesEncoder(512, 64), PROMPT)
    check(BytesEncoder(64, 64), "push")  # nothing was cut off
    with pytest.raises(ConfigError) as error:
        check(BytesEncoder(64, 64), PROMPT)
    for words in (
        "64 tokens",
        "bytes-v1-64x64",
        "bytes-v1-512x64",
        "--text_encoder bytes --num_tokens 512 --text_width 64",
    ):
        assert words in str(error.value)


def test_an_encoder_of_other_texts_is_refused_where_it_meets_the_network(run_of_512: str) -> None:
    path = run_of_512
    config = get_cosmos_predict2_video2world_pipeline(model_size="tiny")
    apply_card(read_card(path), config)
    config.text_encoder = L(BytesEncoder)(num_tokens=64, width=64)
    with pytest.raises(ConfigError, match="--num_tokens"):
        Video2WorldPipeline.from_config(config, path, device="cpu")
    config.text_encoder = None
    pipe = Video2WorldPipeline.from_config(config, path, device="cpu")
    with pytest.raises(ConfigError, match=r"trained with texts by bytes-v1-512x64\. Write one"):
        pipe.world.encode_text(["x"])


@pytest.mark.parametrize(
    ("starts", "said"),
    [
        ('{"start_iteration": 0}\n', ""),
        ("{", "cannot be read"),
        ('{"text": [{"x": 1}]}', "cannot be read"),
        ('{"text": [{"encoder": "bytes", "encoder_tokens": "x", "num_tokens": 4, "width": 8}]}', "expected int"),
    ],
)
def test_a_run_that_recorded_nothing_is_asked_as_before(
    starts: str, said: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert not read_card(_bare_run(tmp_path, starts)).texts and said in caplog.text
    before = get_cosmos_predict2_video2world_pipeline(model_size="tiny")
    assert (before.text_encoder.num_tokens, before.num_text_tokens) == (64, None)


def test_the_last_start_counts_and_two_kinds_of_text_are_told(
    run_of_512: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    line = (Path(run_of_512).parent.parent.parent / "runs.jsonl").read_text()
    choice = choose_model(VideoModel(dit_path=run_of_512))
    assert json.loads(line)["frame_rate"] == choice.config.fps == choice.fps == 20
    fact = json.loads(line)["text"][0]
    assert fact == dict(encoder="bytes-v1-512x64", encoder_tokens=512, num_tokens=512, width=64, constant_path="")
    later = json.dumps({"text": [{**fact, "encoder": "t5"}, fact]})
    bare = _bare_run(tmp_path, f"{line}{later}\n")
    found = with_trained_text(get_cosmos_predict2_video2world_pipeline(model_size="tiny"), [bare])
    assert found.text_encoder_name == "t5"
    assert "texts of 2 kinds" in caplog.text and "by bytes-v1-512x64" in caplog.text


class WithoutWidth:
    """A data set of a user, whose encoder has one width."""

    def __init__(self, num_tokens: int = 8) -> None: ...

    @classmethod
    def facts(cls, arguments: Mapping[str, Any]) -> DataFacts:
        return DataFacts("own", encoder="mine")


def test_data_sets_and_configs_declare_their_text(tmp_path: Path) -> None:
    toy = dict(_target_=ToyWorldVideos, num_tokens=32, width=16)
    robot = dict(_target_=LeRobotActionDataset, root=str(tmp_path), num_tokens=32, text_width=16)
    embed_captions(tmp_path / "t5_xxl", {"episode_000000": "x"}, BytesEncoder(64, 8))
    foreign = [dict(_target_=MockVideos, num_tokens=n, dataset_dir=str(tmp_path)) for n in (None, "all")]
    random = dict(_target_=MockVideos)  # random numbers are no encoder's
    none = dict(_target_="cosmos_predict2.data.dataset_video.Dataset", text_encoder="none")
    for data, text in (
        (toy, TrainedText("bytes-v1-32x16", 32, 32, 16)),
        ({**toy, "captions": False}, TrainedText("none", 32, 32, 16)),
        (robot, TrainedText("none", 32, 32, 16)),
        ({**robot, "load_t5_embeddings": True}, TrainedText("bytes-v1-64x8", 64, 32, 8)),
        *((data, None) for data in (random, none, *foreign, dict(_target_=WithoutWidth))),
    ):
        assert data_text(data) == text
    torch.save(torch.ones(3, 4), tmp_path / "empty.pt")
    for config, text in (
        (TrainingTextConfig(encoder=L(BytesEncoder)(num_tokens=8, width=4)), TrainedText("bytes", 8, 8, 4)),
        (
            TrainingTextConfig(constant_path=str(tmp_path / "empty.pt")),
            TrainedText("none", 3, 3, 4, str(tmp_path / "empty.pt")),
        ),
    ):
        assert text_of_config(config) == text


def test_names_tell_encoders_apart_but_for_tokens_and_rounding() -> None:
    half, single = "t5-11111111-512x1024-bfloat16", "t5-22222222-512x1024-float32"
    assert is_same_encoder(half, single) and is_same_encoder("t5", single) and is_same_encoder(half, half)
    assert not is_same_encoder(half, "t5-22222222-512x1024-bfloat16")
    assert not is_same_encoder("bytes-v1-64x64", "bytes-v2-64x64") and not is_same_encoder("bytes", "t5")
    assert not is_same_encoder("bytes-v1-64x64", "bytes-v1-64x32")
    assert other_text("", "bytes-v1-64x64") is None and other_text("none", "t5") is None
    for dtype in ("bfloat16", "int8"):
        assert parse_name(half.replace("bfloat16", dtype)).flags() == f"--text_encoder t5 --dtype {dtype}"
    assert parse_name("own-v1-3x4-cased").dtype == "" and parse_name(half).dtype == "bfloat16"
    assert parse_name("t5").flags() == "--text_encoder t5" and parse_name("own").flags() == ""
    assert encode_command("a b", "bytes-v1-64x32").endswith(
        "--data 'a b' --text_encoder bytes --num_tokens 64 --text_width 32"
    )
    assert encode_commands("a", "bytes-v1-64x32") == encode_command("a", "bytes-v1-64x32")


@pytest.mark.parametrize("kind", ["bytes", "t5", None])
def test_the_command_for_missing_embeddings_is_one_that_the_tiny_model_takes(tmp_path: Path, kind: str | None) -> None:
    """Followed to the letter, it gives embeddings of the width that the network reads: a start accepts them."""
    (tmp_path / "videos").mkdir()
    (tmp_path / "videos" / "a.mp4").touch()
    (tmp_path / "metas").mkdir()
    (tmp_path / "metas" / "a.txt").write_text("push the red puck")
    data = dict(dataset_dir=str(tmp_path), text_encoder=kind, num_tokens=64, _target_=Dataset)
    net = get_cosmos_predict2_video2world_pipeline(model_size="tiny").net
    said = " ".join(problems(Dataset, **data))
    commands = re.findall(r"get_t5_embeddings (--data \S+ --text_encoder bytes [^)]*)", said)
    assert len(commands) == 1 and ("for a tiny model" in said) == (kind != "bytes")
    assert get_t5_embeddings.run(get_t5_embeddings.parser.parse_args(commands[0].split())) == 0
    data["text_encoder"] = "bytes" if kind else None
    assert [*data_text_problems(data, net)] == []
    record = EmbeddingFolder(tmp_path / "t5_xxl").record
    assert record is not None and (record.num_tokens, record.width) == (64, 64)


def test_texts_are_cut_and_padded_as_the_data_set_does() -> None:
    text = torch.arange(12.0).reshape(1, 4, 3)
    assert torch.equal(with_tokens(text, 2), text[:, :2]) and with_tokens(text, None) is text
    assert torch.equal(with_tokens(text, 6)[:, :4], text) and not with_tokens(text, 6)[:, 4:].any()
