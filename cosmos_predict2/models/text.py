# SPDX-License-Identifier: Apache-2.0
"""The text of a training run: embeddings that the data carry, captions encoded in training, or one for all samples.

One embedding of Reason1 has 512 x 100352 numbers, 103 MB in bfloat16, too many to be kept beside the clips. So the
captions of a batch (``ai_caption``) are encoded in training, equal ones and those that came before once; or all samples
have the same embedding, from a file. Nothing set: the data carry embeddings (``t5_text_embeddings``).

Whatever the source, it must have the width that the network reads, which a check compares before anything is built.
"""

import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor

from cosmos_predict2.conditioner import TEXT_KEY
from cosmos_predict2.data.video_folder import NO_ENCODER
from cosmos_predict2.interfaces import DeclaresWidth
from cosmos_predict2.nn.dit import DiT
from cosmos_predict2.released import describe_missing
from cosmos_predict2.text.bytes_encoder import BytesEncoder
from cosmos_predict2.text.embeddings.encode import EmbeddingCache
from cosmos_predict2.text.embeddings.folder import EmbeddingFolder, find_embedding_dir
from cosmos_predict2.text.embeddings.pickles import NUM_TOKENS
from cosmos_predict2.text.prompt_embeddings import constant_embedding_shape, read_constant_embedding
from cosmos_predict2.text.reason1 import Reason1Encoder
from cosmos_predict2.text.t5 import T5Encoder
from cosmos_predict2.text.trained_text import NO_TEXT, TrainedText, encode_command, parse_name
from imaginaire import storage
from imaginaire.buildable import arguments_of, signature, target_of
from imaginaire.config import lazy_config
from imaginaire.config.schema import Section, at_least
from imaginaire.data.facts import facts_of
from imaginaire.errors import ConfigError, DataError, UserError
from imaginaire.findings import Finding, error

log = logging.getLogger(__name__)

CAPTION_KEY = "ai_caption"
RELEASED_WIDTH = 1024  # of T5-11B; the network's own default
PROJECTION = "crossattn_proj_in_channels"
KEY = "model.config.text"


@attrs.define(kw_only=True, slots=False)
class TrainingTextConfig(Section):
    """The source of the text; at most one of the first two is set."""

    encoder: Any = None  # lazy node of a TextEncoder for the captions
    constant_path: str = ""  # the embedding of every sample, whatever its caption
    cache_bytes: int = attrs.field(default=2 << 30, validator=at_least(0))  # of host memory, for captions that return

    def __attrs_post_init__(self) -> None:
        if self.encoder is not None and self.constant_path:
            raise ConfigError(f"text.encoder and text.constant_path={self.constant_path} are both set: choose one.")

    @property
    def is_set(self) -> bool:
        """True where this replaces the embeddings in the data."""
        return self.encoder is not None or bool(self.constant_path)


class TrainingText:
    """Puts embeddings into batches. The encoder or the file is read at the first one, on the device of training."""

    def __init__(self, config: TrainingTextConfig) -> None:
        self.config = config
        self._encoder: EmbeddingCache | None = None
        self.encoder_name = ""  # with the fingerprint of its weights, once a caption is encoded
        self._constant: Tensor | None = None

    def added_to(self, batch: Mapping[str, Any], size: int, device: torch.device) -> Mapping[str, Any]:
        """The batch with the embeddings of its ``size`` samples, in place of those that it may have."""
        if self.config.encoder is not None:
            return {**batch, TEXT_KEY: self._encoded(batch, size, device)}
        if self.config.constant_path:
            if self._constant is None:
                self._constant = read_constant_embedding(self.config.constant_path).to(device)
            return {**batch, TEXT_KEY: self._constant.expand(size, *self._constant.shape)}
        if TEXT_KEY not in batch:
            raise DataError(
                f"The batch has no '{TEXT_KEY}', and nothing is set to make them of its captions: set {KEY}.encoder (or"
                " constant_path), or take a data set that carries embeddings."
            )
        return batch

    @torch.no_grad()
    def _encoded(self, batch: Mapping[str, Any], size: int, device: torch.device) -> Tensor:
        captions = batch.get(CAPTION_KEY)
        if captions is None or isinstance(captions, str) or len(captions) != size:
            raise DataError(
                f"{KEY}.encoder encodes captions, but the batch's '{CAPTION_KEY}' is {str(captions)[:80]}: a list of"
                f" {size} texts is expected. Give every clip a caption (metas/NAME.txt)."
            )
        if self._encoder is None:
            encoder = lazy_config.instantiate(self.config.encoder)
            self._encoder = EmbeddingCache(encoder, memory_bytes=self.config.cache_bytes).to(device)
            self.encoder_name = self._encoder.name
            log.info("text: captions are encoded by %s", encoder.name)
        return self._encoder.encode(list(captions))


def require_text(net: DiT, text_B_S_E: Tensor, name: str) -> None:
    """Raise for embeddings of a batch, called ``name``, that the network does not take."""
    if (width := text_B_S_E.shape[-1]) != net.text_channels:
        raise DataError(
            f"{name} have width {width}, but the network takes {net.text_channels}: encode the captions with the text"
            " encoder that it was trained with, or let the data set make zeros of that width (text_width)."
        )
    try:
        net.require_readable(text_B_S_E)
    except ValueError as refused:
        raise DataError(
            f"{name} say something. {refused} Leave out the captions (dataset.captions=false in the toy world), or set"
            " model.config.pipe_config.net.reads_text=true."
        ) from refused


# ---- widths, before anything is built


def network_text_width(net: Mapping[str, Any]) -> int:
    """The width of the text that the network of a lazy node reads."""
    return int(net.get(PROJECTION) or net.get("crossattn_emb_channels") or RELEASED_WIDTH)


def encoder_for(width: int, num_tokens: int = NUM_TOKENS) -> str:
    """The encoder that captions are encoded with for a network of this text width: T5, or else the weight-free one."""
    return "t5" if width == RELEASED_WIDTH else BytesEncoder(num_tokens, width).name


def encoder_text_width(node: Any) -> int | None:
    """The width of the texts of an encoder's lazy node; None where its class does not declare it."""
    target = target_of(node) if isinstance(node, Mapping) else None
    if not isinstance(target, DeclaresWidth):
        return None
    try:
        return target.declared_width(**arguments_of(node))
    except (UserError, TypeError):  # TypeError: without an argument that it must have
        return None  # building it raises the error


def data_text_width(data: Mapping[str, Any]) -> tuple[str, int] | None:
    """The argument of a data set that sets the width of the texts that it makes, and its value; None where none does,
    or where it reads texts from files."""
    parameters = signature(target_of(data))
    if "num_tokens" not in parameters or data.get("load_t5_embeddings"):
        return None
    # Beside a height, "width" is one of pixels.
    for name in ("text_width",) if "height" in parameters else ("text_width", "width"):
        if name in parameters:
            value = data.get(name, parameters[name].default)
            return (name, value) if isinstance(value, int) else None
    return None


def check_text(text: Mapping[str, Any], net: Mapping[str, Any]) -> Iterator[Finding]:
    """Faults of the section ``model.config.text`` for a network; reads headers alone."""
    path, width = text.get("constant_path") or "", encoder_text_width(text.get("encoder"))
    key = f"{KEY}.constant_path" if path else f"{KEY}.encoder"
    if path:
        if not storage.exists(path):
            yield error(key, describe_missing(path))
        if storage.is_remote(path) or not storage.exists(path):
            return
        try:
            _, width = constant_embedding_shape(path)
        except UserError as refused:
            yield error(key, str(refused).rstrip("."))
            return
    if width is not None and width != (wanted := network_text_width(net)):
        cure = f"Choose the encoder of the network's weights, or another network ({PROJECTION} is what it reads)"
        yield error(key, f"its texts have width {width}, but the network takes {wanted}", cure)


def data_text_problems(data: Mapping[str, Any], net: Mapping[str, Any]) -> Iterator[str]:
    """Texts of a data set that are of another width than the network's: made by the data set itself, or of a folder."""
    width = network_text_width(net)
    if (made := data_text_width(data)) is not None and made[1] != width:
        name, found = made
        yield (
            f"its texts have width {found} ({name}), but the network takes {width}: set {name}={width}, the width"
            " of the text encoder that the network is for, or choose another network"
        )
    place = data.get("dataset_dir")
    folder = _embedding_dir(data, place)
    try:
        found = width if folder is None else EmbeddingFolder(folder).width
    except DataError:
        return  # the data set's check reports it
    if found != width:
        encoder = encoder_for(width, int(data.get("num_tokens") or NUM_TOKENS))
        yield (
            f"the embeddings in {folder} have width {found}, but the network takes {width}. Delete the folder and"
            f" encode the captions again: {encode_command(str(place), encoder)}, and set"
            f" text_encoder={parse_name(encoder).kind}"
        )


# ---- what a run records


def data_text(data: Mapping[str, Any]) -> TrainedText | None:
    """The text of a data set with these arguments; None where it has none, or does not declare which."""
    target = target_of(data)
    parameters = signature(target)
    if "num_tokens" not in parameters or data.get("text_encoder") == NO_ENCODER:
        return None
    num_tokens = data.get("num_tokens", parameters["num_tokens"].default)
    if not isinstance(num_tokens, int):
        return None  # a class from elsewhere, which means something else by it
    made = data_text_width(data)
    if made is not None and (encoder := facts_of(data).encoder) is not None:
        return TrainedText(encoder, num_tokens, num_tokens, made[1])
    if "load_t5_embeddings" in parameters and not data.get("load_t5_embeddings"):
        return None if made is None else TrainedText(NO_TEXT, num_tokens, num_tokens, made[1])
    place = data.get("dataset_dir") or data.get("root")
    folder = data.get("embedding_dir") or _embedding_dir(data, place)
    if folder is None:
        return None
    try:
        embeddings = EmbeddingFolder(Path(str(folder)))
        record = embeddings.record
        if record is None:
            return TrainedText(str(data.get("text_encoder") or ""), num_tokens, num_tokens, embeddings.width)
    except DataError:
        return None  # the data set's check reports it
    return TrainedText(record.encoder, record.num_tokens, num_tokens, record.width)


def _embedding_dir(data: Mapping[str, Any], place: Any) -> Path | None:
    """The folder of a data set's embeddings, of several cameras that of the front one."""
    folder = find_embedding_dir(Path(str(place))) if place else None
    camera = data.get("front_camera_key") or next(iter(data.get("camera_keys") or ()), "")
    return None if folder is None else folder / str(camera)


def text_of_config(text: TrainingTextConfig) -> TrainedText | None:
    """The text of a run that encodes its captions itself, or has one for all clips."""
    if text.constant_path:
        num_tokens, width = constant_embedding_shape(text.constant_path)
        return TrainedText(NO_TEXT, num_tokens, num_tokens, width, constant_path=str(text.constant_path))
    width_of_encoder = encoder_text_width(text.encoder)
    kinds = {BytesEncoder: "bytes", T5Encoder: "t5", Reason1Encoder: "reason1"}
    if width_of_encoder is None or (cls := target_of(text.encoder)) not in kinds:
        return None
    key = "num_tokens" if cls is BytesEncoder else "max_length"
    num_tokens = int(text.encoder.get(key) or signature(cls)[key].default)
    return TrainedText(kinds[cls], num_tokens, num_tokens, width_of_encoder)
