# SPDX-License-Identifier: Apache-2.0
"""Whole folders: the pipeline of diffusers for a network with its tokenizer and text encoder, and the released layout.

``diffusers-pipeline`` has transformer, vae, scheduler, text_encoder and tokenizer below model_index.json. ``released``
has model.pt with tokenizer and text encoder where `released.py` expects them below one folder; of Wan2.1 the files of
its own repository.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from cosmos_predict2.checkpoints import diffusers_names, wan_names
from cosmos_predict2.checkpoints.card import TEXT_ENCODER, TOKENIZER, ModelCard, known_class
from cosmos_predict2.checkpoints.export import Export, export, network_of_job, readme, write_folder
from cosmos_predict2.checkpoints.networks import CONFIG, Config, read_config
from cosmos_predict2.checkpoints.publishing import CARD, model_card
from cosmos_predict2.checkpoints.verify import differences, other_settings, refuse, verify_network
from cosmos_predict2.released import REASON1_ENCODER_DIR, T5, checkpoint_dir
from cosmos_predict2.text import clip, t5, wan_files
from cosmos_predict2.tokenizers.wan_vae import WanTokenizer
from imaginaire import storage
from imaginaire.checkpoint import weights
from imaginaire.checkpoint.weight_files import is_hub, json_in, local_file, names_at
from imaginaire.errors import CheckpointError, ConfigError

FOLDER_FORMS = ("diffusers-pipeline", "released")
INDEX, SCHEDULER = "model_index.json", "scheduler/scheduler_config.json"
TOKENIZERS = ("vae", "tokenizer/tokenizer.pth", "tokenizer.pth", "Wan2.1_VAE.pth")  # in a folder with other parts
_RELEASED = ("model.pt", TOKENIZERS[1])
_OF_TEXT = {  # files of the text's tokenizer
    "tokenizer.json", "tokenizer_config.json", "spiece.model", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "merges.txt", "chat_template.json", "chat_template.jinja", "preprocessor_config.json",
}  # fmt: skip
_EULER = dict(_class_name="FlowMatchEulerDiscreteScheduler", use_karras_sigmas=True)  # the pipelines set its range
_UNIPC = dict(_class_name="UniPCMultistepScheduler", use_flow_sigmas=True, prediction_type="flow_prediction")
_PIPELINE = ("transformer", "vae", TEXT_ENCODER, TOKENIZER)


@dataclass(frozen=True)
class _Family:
    """The parts that diffusers and the release have beside a network."""

    pipeline: str
    scheduler: Config
    text: tuple[str, str]  # classes of transformers: encoder and tokenizer
    released: tuple[str, str, str, str]  # where `_PIPELINE`'s parts are in the released layout


@dataclass(frozen=True)
class FolderConversion:
    """A conversion of a folder: the networks one by one, folders of text and pictures, and files of settings."""

    job: Export
    networks: Sequence[Export]
    encoders: Mapping[str, tuple[str, str]]  # destination -> (source, class of transformers)
    tokenizers: Mapping[str, str]  # destination -> source, of text and pictures
    settings: Mapping[str, Config]  # in the order of writing
    readme: str = ""


def plan_folder(job: Export, *, tokenizer: str = "", text_encoder: str | None = "") -> FolderConversion:
    """Every part with its place; raises for one that is nowhere. ``text_encoder`` None leaves the text out."""
    if is_hub(job.source):
        raise ConfigError(f"{job.source} is on the hub: fetch the folder first (hf download), and give its path.")
    network = network_of_job(replace(job, form="diffusers"))
    if not network.prefix:
        raise CheckpointError(f"{job.source} is a {network.described}: a whole folder is made of the video network.")
    config, card = network.config(), network.card
    family, to, beside = _family(config, card), job.destination.rstrip("/"), _folder_of(job.source)
    is_pipeline, has_image = job.form == FOLDER_FORMS[0], config.get("image_dim") is not None
    if has_image and not is_pipeline:
        raise CheckpointError(f"{job.source}: --to released has no image encoder, whose file holds a text half, too.")
    places = [storage.join(to, place).rstrip("/") for place in (_PIPELINE if is_pipeline else family.released)]
    vae = Export(tokenizer or _tokenizer_of(beside, card), places[1], "diffusers", overwrite=job.overwrite)
    networks = [replace(job, destination=places[0], form="diffusers"), vae]
    if not is_pipeline:
        networks = [replace(each, form="original" if each.destination == to else "pt") for each in networks]
    encoders: dict[str, tuple[str, str]] = {}
    tokenizers: dict[str, str] = {}
    components: dict[str, str | None] = {TEXT_ENCODER: None, TOKENIZER: None}
    if text_encoder is not None:
        source = _text_of(beside, card, family, text_encoder)
        here = [storage.join(source, name) for name in components]
        if wan_files.file_in(source, wan_files.UMT5):
            here = list(t5.UMT5Encoder.places(source))
        elif not names_at(here[0]):  # one folder for both
            here = [source, source]
        encoders[places[2]], tokenizers[places[3]] = (here[0], family.text[0]), here[1]
        components = dict(zip(components, family.text))
    own_settings: dict[str, Config] = {}
    if has_image:
        components |= {"image_encoder": "CLIPVisionModel", "image_processor": "CLIPImageProcessor"}
        original = wan_files.file_in(beside, wan_files.CLIP)
        encoders[storage.join(to, "image_encoder")] = original or _required(beside, "image_encoder"), "CLIPVisionModel"
        if original:
            own_settings["image_processor/preprocessor_config.json"] = wan_files.PREPROCESSOR
        else:
            tokenizers[storage.join(to, "image_processor")] = _required(beside, "image_processor")
    scheduler = json_in(*os.path.split(storage.join(beside, SCHEDULER))) or family.scheduler
    index: Config = {"_class_name": family.pipeline, "scheduler": ["diffusers", scheduler["_class_name"]]}
    index |= {"transformer": ["diffusers", config["_class_name"]], "vae": ["diffusers", "AutoencoderKLWan"]}
    index |= {name: ["transformers", cls] if cls else [None, None] for name, cls in components.items()}
    index |= {"safety_checker": [None, None]} if config["_class_name"] == diffusers_names.CLASS_NAME else {}
    settings = {**own_settings, SCHEDULER: scheduler, INDEX: index} if is_pipeline else {}
    text = readme(config, to, family.pipeline) if is_pipeline else ""
    return FolderConversion(job, networks, encoders, tokenizers, settings, text)


def write_parts(folder: FolderConversion) -> Mapping[str, Tensor]:
    """Write the folder, its index last; gives the tensors of its networks by their names in the files."""
    written = {name: tensor for job in folder.networks for name, tensor in export(job).items()}
    for destination, (source, cls) in folder.encoders.items():
        write_folder(destination, _encoder(source, cls), _encoder_config(source, cls), None, {}, stem="model")
    for destination, source in folder.tokenizers.items():
        storage.makedirs(destination)
        for name in _files(source):
            storage.write_bytes(storage.join(destination, name), local_file(storage.join(source, name)).read_bytes())
    if folder.readme:
        to, source = folder.job.destination, folder.job.source
        storage.write_text(storage.join(to, CARD), model_card(to, source, folder.readme))
    for name, content in folder.settings.items():
        file = storage.join(folder.job.destination, name)
        storage.makedirs(os.path.dirname(file))
        storage.write_json(file, content)
    return written


def verify_parts(folder: FolderConversion) -> None:
    """Raise unless every part of the destination is that of the source."""
    for job in folder.networks:
        verify_network(job)
    refuse(folder.job, [*_faults(folder)])


def _faults(folder: FolderConversion) -> Iterator[str]:
    for destination, (source, cls) in folder.encoders.items():
        yield from differences(_encoder(source, cls), weights.read(destination))
        yield from other_settings(_encoder_config(source, cls), read_config(destination), destination)
    for destination, source in folder.tokenizers.items():
        for name in _files(source):
            places = [storage.join(place, name) for place in (source, destination)]
            if not storage.exists(places[1]) or len({local_file(place).read_bytes() for place in places}) > 1:
                yield f"{places[1]} is not {places[0]}"
    for name, content in folder.settings.items():
        file = storage.join(folder.job.destination, name)
        yield from other_settings(content, json_in(*os.path.split(file)), name)


# The parts and their places -------------------------------------------------------------------------------------------


def _family(config: Config, card: ModelCard) -> _Family:
    if config["_class_name"] == wan_names.CLASS_NAME:
        is_text = config["image_dim"] is None
        unipc = {**_UNIPC, "flow_shift": (card.pipeline.get("flow") or {}).get("shift", 5.0 if is_text else 3.0)}
        classes, places = ("UMT5EncoderModel", "T5TokenizerFast"), ("", TOKENIZERS[3], TEXT_ENCODER, TOKENIZER)
        return _Family("WanPipeline" if is_text else "WanImageToVideoPipeline", unipc, classes, places)
    if config.get("use_crossattn_projection"):
        unipc = {**_UNIPC, "use_karras_sigmas": True, "sigma_max": 200.0, "sigma_min": 0.01}
        classes = ("Qwen2_5_VLForConditionalGeneration", "Qwen2TokenizerFast")
        released = (*_RELEASED, REASON1_ENCODER_DIR, REASON1_ENCODER_DIR)
        return _Family("Cosmos2_5_PredictBasePipeline", unipc, classes, released)
    is_image = config["in_channels"] == config["out_channels"]
    pipeline = "Cosmos2TextToImagePipeline" if is_image else "Cosmos2VideoToWorldPipeline"
    return _Family(pipeline, _EULER, ("T5EncoderModel", "T5TokenizerFast"), (*_RELEASED, T5, T5))


def _folder_of(source: str) -> str:
    """The folder whose parts belong to a source: itself, or the one that holds the file or the transformer."""
    folder = source if names_at(source) else os.path.dirname(source) or "."
    above = os.path.dirname(folder.rstrip("/")) or "."
    return above if INDEX in names_at(above) else folder


def _tokenizer_of(beside: str, card: ModelCard) -> str:
    recorded: Mapping[str, Any] = card.pipeline.get(TOKENIZER) or {}
    places = [*(storage.join(beside, name) for name in TOKENIZERS), str(recorded.get("vae_pth") or "")]
    if found := next((place for place in places if place and storage.exists(place)), None):
        return found
    if recorded and known_class(recorded) is not WanTokenizer:
        raise CheckpointError(
            f"{card.source} was trained with {recorded.get('_target_')}, for which diffusers has no class: write the"
            " network alone, SOURCE DESTINATION --to diffusers."
        )
    raise CheckpointError(f"{card.source}: no tokenizer at {', '.join(filter(None, places))}. --tokenizer_path PATH.")


def _text_of(beside: str, card: ModelCard, family: _Family, given: str) -> str:
    recorded: Mapping[str, Any] = card.pipeline.get(TEXT_ENCODER) or {}
    places = [beside, storage.join(beside, family.released[2]), str(recorded.get("path") or beside)]
    places = [given] if given else [*places, storage.join(checkpoint_dir(), family.released[2])]
    for place in places:
        is_folder_of_both = _files(place) and CONFIG in names_at(place)
        is_original = wan_files.file_in(place, wan_files.UMT5)
        if CONFIG in names_at(storage.join(place, TEXT_ENCODER)) or is_folder_of_both or is_original:
            return place
    raise CheckpointError(
        f"{card.source}: no text encoder at {', '.join(dict.fromkeys(places))}, a folder with {TEXT_ENCODER} and"
        f" {TOKENIZER} or with the files of both. --text_encoder_path FOLDER, or --no_text_encoder to leave it out."
    )


def _required(beside: str, name: str) -> str:
    place = storage.join(beside, name)
    if not names_at(place):
        raise CheckpointError(f"{place} is missing: this network reads pictures by it. Fetch the folder again.")
    return place


def _files(folder: str) -> list[str]:
    return [name for name in names_at(folder) if name in _OF_TEXT]


def _encoder(source: str, cls: str) -> Mapping[str, Tensor]:
    """The tensors of an encoder; of T5 without its decoder, and its table of words once."""
    if cls == "CLIPVisionModel" and wan_files.is_original(source):
        return weights.renamed(wan_files.clip_tensors(source), lambda name: clip.PREFIX + name)
    return t5.encoder_weights(source) if cls.endswith("T5EncoderModel") else weights.read(source)


def _encoder_config(source: str, cls: str) -> Config:
    config = read_config(source)
    if wan_files.is_original(source):
        config = wan_files.clip_settings(source) if cls == "CLIPVisionModel" else wan_files.umt5_settings(source)
    if not config:
        raise CheckpointError(f"{source} has no {CONFIG}. Fetch the folder again.")
    return {**config, "architectures": [cls]}
