# SPDX-License-Identifier: Apache-2.0
"""Forms, both ways, exactly; what is refused, with its reason; and faults that --verify finds."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors
import safetensors.torch
import torch
import yaml
from torch import Tensor, nn

from cosmos_predict2.checkpoints.adapters import Adapter, read_adapter
from cosmos_predict2.checkpoints.card import name_of
from cosmos_predict2.checkpoints.dit_loading import load_dit
from cosmos_predict2.checkpoints.export import FORMS, Export, export
from cosmos_predict2.checkpoints.export_adapters import ADAPTER_FORMS, export_adapter
from cosmos_predict2.checkpoints.networks import open_network
from cosmos_predict2.checkpoints.verify import stand_in_for_torchvision
from cosmos_predict2.conditioner import Condition
from cosmos_predict2.nn.action_dit import ChunkActionDiT
from cosmos_predict2.nn.dit import DiT, Video2WorldDiT
from cosmos_predict2.nn.wan_dit import WanDiT
from cosmos_predict2.released import REASON1_ENCODER_DIR, T5, TINY_VIDEO2WORLD
from cosmos_predict2.text.t5 import T5Encoder
from cosmos_predict2.tokenizers.wan_network import WanConfig, WanVAE
from cosmos_predict2.tokenizers.wan_vae import WanTokenizer
from cosmos_predict2.world_model.config import Video2WorldPipelineConfig
from cosmos_predict2.world_model.options import SamplingOptions
from cosmos_predict2.world_model.world_model import WorldModel
from imaginaire.checkpoint.layout import KINDS, CheckpointSet, write_standard
from imaginaire.errors import CheckpointError, ConfigError
from scripts.convert import parser, run
from tests.checkpoints.nets import ALPHA, RANK, SMALL, adapted, filled, parameters_of, save, save_run
from tests.text.folders import T5_SIZES, original_clip, original_umt5, reason1_folder, t5_folder

SINGLE_FILES = {"pt": ".pt", "safetensors": ".safetensors", "comfyui": ".safetensors", "kohya": ".safetensors"}
WAN = dict(model_channels=48, num_blocks=2, num_heads=3, ffn_channels=40, crossattn_emb_channels=8)
NETWORKS: dict[str, tuple[type[nn.Module], dict[str, Any]]] = {
    "Video2World": (Video2WorldDiT, SMALL),
    "Text2Image": (DiT, SMALL),
    "Predict2.5": (Video2WorldDiT, {**SMALL, "crossattn_proj_in_channels": 24}),
    "Wan2.1 T2V": (WanDiT, WAN),
    "Wan2.1 I2V": (WanDiT, {**WAN, "in_channels": 36, "image_channels": 12}),
    "tokenizer": (WanVAE, {"config": WanConfig(dim=4)}),
    "actions": (ChunkActionDiT, {**SMALL, "action_dim": 3, "temporal_compression_ratio": 4}),
}
REFUSED = {
    **{(name, "original"): "was released as a single file" for name in NETWORKS if not name.startswith("Wan")},
    ("actions", "diffusers"): "diffusers has no class for it",
}


def _network(name: str) -> tuple[nn.Module, dict[str, Any]]:
    """A network with random weights, and the arguments that its run records."""
    cls, arguments = NETWORKS[name]
    return filled(cls(**arguments), seed=1), {"_target_": name_of(cls), **arguments}


def _source(name: str, folder: Path, dtype: torch.dtype = torch.float32) -> str:
    """The newest checkpoint of a run, or the tokenizer's file."""
    net, arguments = _network(name)
    if name == "tokenizer":
        return save(folder, {key: p.to(dtype) for key, p in parameters_of(net).items()}, "source.pt")
    recorded = {"model": {"config": {"pipe_config": {"net": arguments}}}}
    (folder / "config.yaml").write_text(yaml.safe_dump(recorded))
    return save(folder, {f"net.{key}": p.to(dtype) for key, p in parameters_of(net).items()}, "source.pt")


def _to(form: str, source: str, folder: Path, **options: Any) -> str:
    destination = str(folder / f"{Path(source).name}-{form}{SINGLE_FILES.get(form, '')}")
    (export_adapter if form in ADAPTER_FORMS else export)(Export(source, destination, form, **options))
    return destination


FAST = "Video2World"  # of other networks each form is written and read, which is all that a pair does


@pytest.mark.parametrize("first", FORMS)
@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n == FAST else pytest.mark.slow) for n in NETWORKS])
def test_each_pair_of_forms_is_exact(name: str, first: str, tmp_path: Path) -> None:
    source = _source(name, tmp_path, torch.bfloat16 if first == "diffusers" else torch.float32)
    if (name, first) in REFUSED:
        with pytest.raises(CheckpointError, match=REFUSED[name, first]):
            _to(first, source, tmp_path)
        return
    expected = open_network(source)
    (tmp_path / "elsewhere").mkdir()
    written = _to(first, source, tmp_path / "elsewhere")
    (tmp_path / "config.yaml").unlink(missing_ok=True)  # what follows is recorded in the form itself
    kept = [form for form in FORMS if (name, form) not in REFUSED]
    for second in kept if name == FAST else kept[:1]:
        found = open_network(_to(second, written, tmp_path))
        assert set(found.tensors) == set(expected.tensors)
        for key in expected.tensors:
            assert found.tensors[key].dtype == expected.tensors[key].dtype
            assert torch.equal(found.tensors[key], expected.tensors[key]), (first, second, key)
        if name != "actions":
            assert found.config() == expected.config()
        else:
            assert found.card.net.items() >= SMALL.items()


# Adapters alone -------------------------------------------------------------------------------------------------------

TARGETS = {"Video2World": "q_proj,mlp.layer1", "Wan2.1 I2V": "q,k_img,ffn.2"}


def _adapted(name: str, folder: Path, dtype: torch.dtype = torch.float32) -> str:
    """The run of a network with adapters beside its weights."""
    net, arguments = _network(name)
    recorded = dict(pipe_config={"net": arguments}, model_manager_config={"dit_path": "base.pt"})
    net = adapted(net, TARGETS[name]).to(dtype)
    return save_run(folder, net, lora_alpha=ALPHA, lora_target_modules=TARGETS[name], **recorded)


def _assert_same_adapter(found: Adapter, expected: Adapter) -> None:
    assert found.layers.keys() == expected.layers.keys()
    assert (found.base, found.base_fingerprint) == (expected.base, expected.base_fingerprint)
    for layer, factors in expected.layers.items():
        assert found.layers[layer].scaling == factors.scaling == ALPHA / RANK
        for ours, theirs in zip(found.layers[layer].factors(), factors.factors()):
            assert ours.dtype == theirs.dtype and torch.equal(ours, theirs), layer


@pytest.mark.parametrize("name", [FAST, pytest.param("Wan2.1 I2V", marks=pytest.mark.slow)])
def test_each_pair_of_forms_of_an_adapter_is_exact(name: str, tmp_path: Path) -> None:
    source = _adapted(name, tmp_path / "run", torch.bfloat16)
    expected = read_adapter(source)
    for first in ADAPTER_FORMS:
        (tmp_path / first).mkdir()
        written = _to(first, source, tmp_path / first)
        _assert_same_adapter(read_adapter(written), expected)
        for second in ADAPTER_FORMS:
            _assert_same_adapter(read_adapter(_to(second, written, tmp_path / first)), expected)
    _convert("--from", written, "--to", str(tmp_path / "folder_of_diffusers"), "--verify")
    assert (tmp_path / "folder_of_diffusers/pytorch_lora_weights.safetensors").exists()
    with pytest.raises(CheckpointError, match=r"is a LoRA adapter, so give it with --lora"):
        _to("safetensors", written, tmp_path)
    with pytest.raises(CheckpointError, match="holds no LoRA adapter"):
        _to("kohya", _source(name, tmp_path), tmp_path)
    with pytest.raises(ConfigError, match=r"does not end in \.safetensors"):
        export_adapter(Export(source, str(tmp_path / "folder"), "comfyui"))


@pytest.mark.parametrize("form", ["pt", "safetensors", "diffusers", "peft", "kohya"])
def test_what_exists_stays_unless_overwritten(form: str, tmp_path: Path) -> None:
    source = (_adapted if form in ADAPTER_FORMS else _source)(FAST, tmp_path)
    _to(form, source, tmp_path)
    with pytest.raises(CheckpointError, match="--overwrite"):
        _to(form, source, tmp_path)
    _to(form, source, tmp_path, overwrite=True, dtype=torch.bfloat16)


# --verify -------------------------------------------------------------------------------------------------------------


def _convert(*words: str) -> None:
    run(parser.parse_args(words))


def _edit(file: str, change: Callable[[dict[str, Tensor]], None], **header: str) -> None:
    """Change the tensors of a file, or of the one in a folder, and entries of its header."""
    path = Path(file) if Path(file).is_file() else next(Path(file).glob("*.safetensors"))
    if path.suffix == ".pt":
        state = torch.load(path, weights_only=True)
        change(state)
        torch.save(state, path)
        return
    with safetensors.safe_open(path, "pt") as opened:
        metadata = {**opened.metadata(), **header}
    state = safetensors.torch.load_file(path)
    change(state)
    safetensors.torch.save_file(state, path, metadata)


def _wrong_key(state: dict[str, Tensor]) -> None:
    name = next(name for name in state if name.endswith("weight") and ("blocks.1." in name or "conv2" in name))
    state[f"{name}x"] = state.pop(name)


def _wrong_value(state: dict[str, Tensor]) -> None:
    name = [name for name, tensor in state.items() if tensor.is_floating_point() and tensor.ndim > 1][-1]
    state[name] = state[name].clone()
    state[name].view(-1)[1] += 0.25


def _wrong_scale(folder: str) -> None:
    """A setting by which the same weights compute something else."""
    file = Path(folder, "config.json")
    config = json.loads(file.read_text())
    wrong: dict[str, Any] = {"rope_scale": [0.5, 2.0, 3.0], "latents_std": [1.0] * 16, "num_attention_heads": 6}
    key = next(key for key in wrong if key in config)
    config[key] = wrong[key]
    file.write_text(json.dumps(config))


def _keep(path: str) -> Callable[[], object]:
    """A function that puts a file, or the files of a folder, back as they are now: quicker than converting again."""
    kept, is_folder = f"{path}.kept", Path(path).is_dir()
    if is_folder:
        shutil.copytree(path, kept)
        return lambda: shutil.copytree(kept, path, dirs_exist_ok=True)
    shutil.copy(path, kept)
    return lambda: shutil.copy(kept, path)


VERIFIED = [(name, form) for name in NETWORKS for form in ("pt", "diffusers") if (name, form) not in REFUSED]
QUICK = [(FAST, "pt"), ("tokenizer", "pt")]  # diffusers takes seconds to import
MARKS = dict.fromkeys(QUICK, ()) | {(FAST, "diffusers"): pytest.mark.slow}


@pytest.mark.parametrize(
    ("name", "form"), [pytest.param(*each, marks=MARKS.get(each, pytest.mark.long)) for each in VERIFIED]
)
def test_verify_finds_a_wrong_key_a_wrong_value_and_a_wrong_scale(
    name: str, form: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    source = _source(name, tmp_path)
    (tmp_path / "e").mkdir()
    words = [source, str(tmp_path / "e" / f"x{SINGLE_FILES.get(form, '')}"), "--to", form, "--verify"]
    _convert(*words)
    assert "verified: the outputs of both are equal" in caplog.text
    assert ("verified: the outputs of diffusers'" in caplog.text) == (form == "diffusers"), caplog.text
    put_back = _keep(words[1])
    changes = [(_wrong_key, "weightx"), (_wrong_value, "1 tensors differ: .*by up to 0.25")]
    changes += [(lambda state: state.update({key: state[key].double() for key in state}), "torch.float64 .*, not ")]
    for change, message in changes:
        _edit(words[1], change)
        with pytest.raises(CheckpointError, match=message):
            _convert(*words)
        put_back()
    if form == "diffusers":
        _wrong_scale(words[1])
        with pytest.raises(CheckpointError, match=r"config\.json has (rope_scale|latents_std|num_attention_heads)="):
            _convert(*words)


@pytest.mark.parametrize("form", ADAPTER_FORMS)
def test_verify_finds_faults_of_an_adapter(form: str, tmp_path: Path) -> None:
    source = _adapted("Video2World", tmp_path / "run")
    words = [source, str(tmp_path / f"x{SINGLE_FILES.get(form, '')}"), "--to", form, "--verify"]
    _convert(*words)

    def lost(state: dict[str, Tensor]) -> None:
        for name in [name for name in state if "blocks.1." in name or "blocks_1_" in name]:
            del state[name]

    def scale(state: dict[str, Tensor]) -> None:
        for name in [name for name in state if name.endswith(".alpha")]:
            state[name] = state[name] * 2

    for change, message in [(lost, "names are missing"), (_wrong_value, "by up to 0.25")]:
        _edit(words[1], change)
        with pytest.raises(CheckpointError, match=message):
            _convert(*words)
        _convert(*words, "--overwrite")
    settings = {"transformer.r": RANK, "transformer.lora_alpha": 24}
    _edit(words[1], scale, **({"lora_adapter_metadata": json.dumps(settings)} if form == "diffusers-lora" else {}))
    if form == "peft":
        file = Path(words[1], "adapter_config.json")
        file.write_text(file.read_text().replace('"lora_alpha": 12', '"lora_alpha": 24'))
    with pytest.raises(CheckpointError, match="is added with a scale of 8, in the source with 4"):
        _convert(*words)


def test_weights_in_float16_are_verified_beyond_its_range(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Activations of the tiny model that ships overflow in the float16 of its weights."""
    caplog.set_level("INFO")
    _convert(TINY_VIDEO2WORLD, str(tmp_path / "x.pt"), "--to", "pt", "--verify")
    assert "verified: the outputs of both are equal" in caplog.text
    source = _source(FAST, tmp_path)
    _edit(source, lambda tensors: next(iter(tensors.values())).fill_(3e38))
    with pytest.raises(CheckpointError, match="outputs are not finite"):
        _convert(source, str(tmp_path / "y.pt"), "--to", "pt", "--verify")


def test_verify_compares_training_states(tmp_path: Path) -> None:
    saved = CheckpointSet(str(tmp_path / "run/checkpoints"), "iter_000000004.pt")
    trees: dict[str, Any] = {kind: {"a": {"b": torch.arange(3.0), "c": 1}} for kind in KINDS}
    write_standard(saved, {**trees, "trainer": {"iteration": 4}})
    words = [str(tmp_path / "run"), str(tmp_path / "dcp"), "--to", "dcp", "--verify"]
    _convert(*words)
    write_standard(saved, {**trees, "scheduler": {"a": {"b": torch.ones(3), "c": 2}}, "trainer": {"iteration": 4}})
    with pytest.raises(CheckpointError, match=r"scheduler\.a\.b \(by up to 1\).*scheduler\.a\.c=1, the source 2"):
        _convert(*words)


# Whole folders --------------------------------------------------------------------------------------------------------


def _parts(name: str, folder: Path) -> str:
    """The released layout of a network with small tokenizers and text encoder; its run's card is in the file."""
    from transformers import CLIPVisionConfig, CLIPVisionModel, UMT5Config, UMT5EncoderModel

    made = folder / "made"
    made.mkdir()
    run_file = _source(name, made)
    source = str(folder / "here" / "model.safetensors")
    Path(source).parent.mkdir()
    export(Export(run_file, source, "safetensors"))
    places = {"Predict2.5": "tokenizer.pth", "Wan2.1 T2V": "Wan2.1_VAE.pth", "Wan2.1 I2V": "Wan2.1_VAE.pth"}
    vae = folder / "here" / places.get(name, "tokenizer/tokenizer.pth")
    vae.parent.mkdir(exist_ok=True)
    torch.save(filled(WanVAE(WanConfig(dim=4)), seed=2).state_dict(), vae)
    if name == "Predict2.5":
        reason1_folder(folder / "here" / REASON1_ENCODER_DIR)
    elif name.startswith("Wan"):
        t5_folder(made / "t5")
        (folder / "here/tokenizer").mkdir()
        shutil.copy(made / "t5/spiece.model", folder / "here/tokenizer")
        UMT5EncoderModel(UMT5Config(vocab_size=200, **T5_SIZES)).save_pretrained(folder / "here/text_encoder")
    else:
        t5_folder(folder / "here" / T5, layout="bin", d_model=16)
    if name == "Wan2.1 I2V":
        sizes = dict(hidden_size=12, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2, image_size=28)
        CLIPVisionModel(CLIPVisionConfig(patch_size=14, **sizes)).save_pretrained(folder / "here/image_encoder")
        (folder / "here/image_processor").mkdir()
        (folder / "here/image_processor/preprocessor_config.json").write_text("{}")
    return source


PIPELINES = {
    "Video2World": ("Cosmos2VideoToWorldPipeline", None),
    "Text2Image": ("Cosmos2TextToImagePipeline", None),
    "Predict2.5": ("Cosmos2_5_PredictBasePipeline", None),
    "Wan2.1 T2V": ("WanPipeline", 5.0),
    "Wan2.1 I2V": ("WanImageToVideoPipeline", 3.0),
}
WHOLE_LONG = ("Text2Image", "Wan2.1 T2V")  # the others have their classes


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.long if name in WHOLE_LONG else ()) for name in PIPELINES]
)
def test_a_whole_folder_goes_to_diffusers_and_back(name: str, tmp_path: Path) -> None:
    import diffusers

    source, pipeline, back = _parts(name, tmp_path), str(tmp_path / "pipeline"), str(tmp_path / "back")
    _convert("--from", source, "--to", f"{pipeline}/", "--verify")
    index = json.loads(Path(pipeline, "model_index.json").read_text())
    assert hasattr(diffusers, index["_class_name"])
    scheduler = json.loads(Path(pipeline, "scheduler/scheduler_config.json").read_text())
    assert (index["_class_name"], scheduler.get("flow_shift")) == PIPELINES[name]
    assert ("safety_checker" in index) != name.startswith("Wan")
    if name == "Wan2.1 I2V":
        with pytest.raises(CheckpointError, match="no image encoder"):
            _convert(pipeline, back, "--to", "released")
        _from_original_names(tmp_path / "here", pipeline, source, str(tmp_path / "again"))
    else:
        _convert(pipeline, back, "--to", "released", "--verify")
        again = str(tmp_path / "again")
        _convert("--from", back, "--to", again)
        for file in Path(pipeline).rglob("*.*"):
            there = Path(again, file.relative_to(pipeline))
            if file.suffix == ".safetensors":
                ours, theirs = (safetensors.torch.load_file(each) for each in (file, there))
                assert ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in ours)
            elif file.suffix != ".md":
                assert there.read_bytes() == file.read_bytes(), there


def _from_original_names(here: Path, pipeline: str, source: str, again: str) -> None:
    """The same folder, made of the encoders' files in Wan2.1's own repository."""
    names = {"text_encoder": "models_t5_umt5-xxl-enc-bf16.pth"}
    names["image_encoder"] = "models_clip_open-clip-xlm-roberta-large-vit-huge-14.pth"
    parts = {name: safetensors.torch.load_file(Path(pipeline, name, "model.safetensors")) for name in names}
    for name, rename in (("text_encoder", original_umt5), ("image_encoder", original_clip)):
        torch.save(rename(parts[name]), here / names[name])
        shutil.rmtree(here / name)
    shutil.rmtree(here / "image_processor")
    (here / "google").mkdir()
    (here / "tokenizer").rename(here / "google/umt5-xxl")
    _convert("--from", source, "--to", again, "--verify")
    for name, there in parts.items():
        found = safetensors.torch.load_file(Path(again, name, "model.safetensors"))
        bare = {key.removeprefix("vision_model."): tensor for key, tensor in found.items()}
        assert bare.keys() == there.keys() and all(torch.equal(bare[key], there[key]) for key in bare)
        settings = [json.loads(Path(root, name, "config.json").read_text()) for root in (again, pipeline)]
        sizes = {key: value for key, value in settings[0].items() if key in settings[1]}
        # the activation of CLIP and the width of a head, which no file has, are those of the released one
        assert {key for key, value in sizes.items() if settings[1][key] != value} <= {
            "hidden_act",
            "num_attention_heads",
        }
    processor = json.loads(Path(again, "image_processor/preprocessor_config.json").read_text())
    assert (processor["size"], processor["do_center_crop"]) == ({"height": 224, "width": 224}, False)


@pytest.mark.slow
def test_faults_and_missing_parts_of_a_whole_folder_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, pipeline = _parts("Video2World", tmp_path), str(tmp_path / "pipeline")
    words = ["--from", source, "--to", pipeline]
    _convert(*words)
    with pytest.raises(CheckpointError, match="exists already"):
        _convert(*words)
    faults: dict[str, tuple[Callable[[Path], Any], str]] = {
        "transformer": (lambda folder: _edit(str(folder), _wrong_key), "weightx"),
        "vae": (lambda folder: _wrong_scale(str(folder)), "latents_std"),
        "text_encoder": (lambda folder: _edit(str(folder), _wrong_value), "1 tensors differ"),
        "scheduler": (lambda folder: (folder / "scheduler_config.json").write_text("{}"), "=None, the source"),
        "tokenizer": (lambda folder: next(folder.iterdir()).write_text("other"), "pipeline/tokenizer/.* is not"),
    }
    put_back = _keep(pipeline)
    for part, (fault, message) in faults.items():
        fault(Path(pipeline, part))
        with pytest.raises(CheckpointError, match=message):
            _convert(*words, "--verify")
        put_back()
    scheduler = Path(pipeline, "scheduler/scheduler_config.json")
    scheduler.write_text("{")
    for damaged in ([*words, "--verify"], ["--from", f"{pipeline}/transformer", "--to", str(tmp_path / "other")]):
        with pytest.raises(CheckpointError, match=r"scheduler_config\.json cannot be read"):
            _convert(*damaged)
    _convert(*words, "--overwrite")
    without = ["--from", source, "--to", str(tmp_path / "without")]
    for part, cure in [(T5, "--text_encoder_path FOLDER, or --no_text_encoder"), ("tokenizer", "--tokenizer_path PA")]:
        shutil.rmtree(tmp_path / "here" / part)
        with pytest.raises(CheckpointError, match=cure):
            _convert(*without)
    _convert(*without, "--no_text_encoder", "--tokenizer_path", f"{pipeline}/vae")
    assert json.loads((tmp_path / "without/model_index.json").read_text())["text_encoder"] == [None, None]
    monkeypatch.chdir(pipeline)
    _convert("--from", "transformer", "--to", "../of_its_transformer")  # with the parts beside it
    _convert("--from", "../pipeline/", "--to", "../of_its_transformer", "--verify")
    with pytest.raises(CheckpointError, match=r"is a tokenizer of Wan2\.1, width 4: a whole folder"):
        _convert("--from", "vae", "--to", "../of_its_tokenizer")
    with pytest.raises(ConfigError, match="--no_text_encoder is for whole folders"):
        _convert(source, str(tmp_path / "x.pt"), "--no_text_encoder")
    with pytest.raises(CheckpointError, match=r"TinyTokenizer, for which diffusers has no class.*--to diffusers"):
        _convert("--from", TINY_VIDEO2WORLD, "--to", str(tmp_path / "tiny"))


class _NoChecks(nn.Module):
    """In place of the safety checker, which needs weights."""

    device, dtype = torch.device("cpu"), torch.float32

    def to(self, *_: Any) -> "_NoChecks":
        return self

    def check_text_safety(self, _: str) -> bool:
        return True


@pytest.mark.slow
@torch.no_grad()
def test_the_pipeline_of_diffusers_gives_our_numbers_with_the_frame_rate_of_its_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from diffusers import Cosmos2VideoToWorldPipeline
    from diffusers.pipelines.cosmos import pipeline_cosmos2_video2world as theirs

    source, folder = _parts("Video2World", tmp_path), str(tmp_path / "pipeline")
    _convert("--from", source, "--to", folder)
    fps = re.search(r"Call it with fps=(\d+)", Path(folder, "README.md").read_text())
    assert fps is not None
    stand_in_for_torchvision()
    monkeypatch.setattr(theirs, "retrieve_latents", lambda encoded, *_: encoded.latent_dist.mode())  # as ours; it draws
    pipe = Cosmos2VideoToWorldPipeline.from_pretrained(folder, safety_checker=_NoChecks())
    generator = torch.Generator().manual_seed(3)
    noise, video = torch.randn(1, 16, 3, 4, 4, generator=generator), torch.rand(1, 5, 3, 32, 32, generator=generator)
    size = dict(height=32, width=32, num_frames=9, num_inference_steps=6, latents=noise, output_type="latent")
    words = dict(prompt="push the red puck", negative_prompt="the camera pans")
    outputs = [pipe(video=video, **words, **size, fps=rate).frames for rate in (int(fps[1]), 16)]

    net = open_network(source).build()
    load_dit(net, source)
    tokenizer = WanTokenizer(str(tmp_path / "here/tokenizer/tokenizer.pth"), config=WanConfig(dim=4))
    encoder = T5Encoder(str(tmp_path / "here" / T5))
    world = WorldModel(Video2WorldPipelineConfig(), net.eval(), tokenizer)
    frames = torch.cat([video, video[:, -1:].expand(-1, 4, -1, -1, -1)], 1).transpose(1, 2) * 2 - 1
    conditions = [
        Condition(encoder.encode(text), torch.zeros(1, 1, 32, 32)).with_conditioning_frames(
            tokenizer.encode(frames), torch.tensor([2])
        )
        for text in words.values()
    ]
    states: list[Tensor] = []
    options = SamplingOptions(guidance=7.0, num_steps=5, solver="1euler")
    world.sample(
        conditions[0], conditions[1], noise, options, lambda _, step: states.append(step.x_next_B_C_T_H_W.float())
    )
    torch.testing.assert_close(outputs[0], states[-1], rtol=1e-4, atol=1e-4)
    with pytest.raises(AssertionError, match="not close"):
        torch.testing.assert_close(outputs[1], states[-1], rtol=1e-4, atol=1e-4)
