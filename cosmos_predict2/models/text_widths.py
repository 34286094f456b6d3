# SPDX-License-Identifier: Apache-2.0
"""What texts are: how wide the network reads them, and what an encoder, the data or a batch of them give."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from cosmos_predict2.data.video_folder import NO_ENCODER
from cosmos_predict2.nn.dit import DiT
from cosmos_predict2.text.bytes_encoder import BytesEncoder
from cosmos_predict2.text.constant_embedding import constant_embedding_shape
from cosmos_predict2.text.embeddings.folder import EmbeddingFolder, find_embedding_dir
from cosmos_predict2.text.embeddings.pickles import NUM_TOKENS
from cosmos_predict2.text.encoder_names import TINY_WIDTH, encode_command, parse_name
from cosmos_predict2.text.trained_text import KINDS, NO_TEXT, TrainedText
from imaginaire import storage
from imaginaire.config import lazy_config
from imaginaire.config.names import target_of
from imaginaire.errors import DataError, UserError

RELEASED_WIDTH = 1024  # of T5-11B; the network's own default
PROJECTION = "crossattn_proj_in_channels"


def network_text_width(net: Mapping[str, Any]) -> int:
    """How wide the text is that a network's lazy node reads."""
    return int(net.get(PROJECTION) or net.get("crossattn_emb_channels") or RELEASED_WIDTH)


def encoder_text_width(node: Any) -> int | None:
    """How wide the texts of an encoder's lazy node will be, where its class declares it; of an encoder that is built
    already, how wide they are."""
    if not isinstance(node, Mapping):
        width: int | None = getattr(node, "width", None)
        return width
    declared = getattr(target_of(node), "declared_width", None)
    if not callable(declared):
        return None
    try:
        width = declared(**{str(key): value for key, value in node.items() if not str(key).startswith("_")})
    except (UserError, TypeError):  # TypeError: without an argument that it must have
        return None  # building it raises the error
    return width


def data_text_width(data: Mapping[str, Any]) -> tuple[str, int] | None:
    """The argument of a data set that sets the width of the texts that it makes, and its value; None where none does,
    or where it reads texts from files."""
    parameters = lazy_config.signature(target_of(data))
    if "num_tokens" not in parameters or data.get("load_t5_embeddings"):
        return None
    # Beside a height, "width" is one of pixels.
    for name in ("text_width",) if "height" in parameters else ("text_width", "width"):
        if name in parameters:
            value = data.get(name, parameters[name].default)
            return (name, value) if isinstance(value, int) else None
    return None


def data_text(data: Mapping[str, Any]) -> TrainedText | None:
    """The text of a data set with these arguments; None where it has none, or does not say which."""
    target = target_of(data)
    parameters = lazy_config.signature(target)
    if "num_tokens" not in parameters or data.get("text_encoder") == NO_ENCODER:
        return None
    num_tokens = data.get("num_tokens", parameters["num_tokens"].default)
    if not isinstance(num_tokens, int):
        return None  # a class from elsewhere, which means something else by it
    made = data_text_width(data)
    if callable(declared := getattr(target, "declared_encoder", None)):
        assert made is not None
        arguments = {str(key): value for key, value in data.items() if not str(key).startswith("_")}
        return TrainedText(declared(**arguments), num_tokens, num_tokens, made[1])
    if "load_t5_embeddings" in parameters and not data.get("load_t5_embeddings"):
        return None if made is None else TrainedText(NO_TEXT, num_tokens, num_tokens, made[1])
    place = data.get("dataset_dir") or data.get("root")
    folder = data.get("embedding_dir") or (find_embedding_dir(Path(str(place))) if place else None)
    if folder is None:
        return None
    try:
        embeddings = EmbeddingFolder(Path(str(folder)))
        record = embeddings.record()
        if record is None:
            return TrainedText(str(data.get("text_encoder") or ""), num_tokens, num_tokens, embeddings.width)
    except DataError:
        return None  # the data set's check reports it
    return TrainedText(record.encoder, record.num_tokens, num_tokens, record.width)


def text_of_config(text: Any) -> TrainedText | None:
    """The text of a run that encodes its captions itself (a ``TrainingTextConfig``), or has one for all clips."""
    if text.constant_path:
        num_tokens, width = constant_embedding_shape(text.constant_path)
        return TrainedText(NO_TEXT, num_tokens, num_tokens, width, constant_path=str(text.constant_path))
    width_of_encoder, node = encoder_text_width(text.encoder), text.encoder
    cls = target_of(node) if isinstance(node, Mapping) else type(node)
    kind = next((kind for kind, known in KINDS.items() if known is cls), None)
    if kind is None or width_of_encoder is None or not isinstance(node, Mapping):
        return None
    key = "num_tokens" if kind == "bytes" else "max_length"
    num_tokens = int(node.get(key) or lazy_config.signature(cls)[key].default)
    return TrainedText(kind, num_tokens, num_tokens, width_of_encoder)


def text_problems(text: Mapping[str, Any], net: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """(config key, text, cure) of what is wrong with the text of a training run (``model.config.text``) for a network;
    reads headers alone."""
    key, wanted = "model.config.text", network_text_width(net)
    cure = f"Choose the encoder of the network's weights, or another network ({PROJECTION} is what it reads)"
    path = text.get("constant_path") or ""
    if text.get("encoder") is not None:
        width = encoder_text_width(text["encoder"])
        if width is not None and width != wanted:
            yield f"{key}.encoder", f"its texts have width {width}, but the network takes {wanted}", cure
    elif path and not storage.is_remote(path) and storage.exists(path):
        try:
            _, width = constant_embedding_shape(path)
        except UserError as error:
            yield f"{key}.constant_path", str(error).rstrip("."), ""
            return
        if width != wanted:
            yield f"{key}.constant_path", f"{path} has width {width}, but the network takes {wanted}", cure


def data_text_problems(data: Mapping[str, Any], net: Mapping[str, Any]) -> Iterator[str]:
    """Texts of a data set that are of another width than the network's: of a folder, or made by the data set itself."""
    width = network_text_width(net)
    if (made := data_text_width(data)) is not None and made[1] != width:
        name, found = made
        yield (
            f"its texts have width {found} ({name}), but the network takes {width}: set {name}={width}, the width"
            " of the text encoder that the network is for, or choose another network"
        )
    folder = find_embedding_dir(Path(str(data["dataset_dir"]))) if data.get("dataset_dir") else None
    encoder = encoder_for(width, int(data.get("num_tokens") or NUM_TOKENS))
    kind, place = parse_name(encoder).kind, Path(str(data.get("dataset_dir")))
    cure = f"{encode_command(place, encoder)}, and set text_encoder={kind}"
    if folder is None:
        own = kind if width in (RELEASED_WIDTH, TINY_WIDTH) else ""  # by the data set itself
        if place.is_dir() and data.get("text_encoder") not in (own, None, NO_ENCODER):
            yield f"{place} needs embeddings of width {width}, by {kind}: {cure}"
        return
    try:
        found = EmbeddingFolder(folder).width
    except DataError:
        return  # the data set's check reports it
    if found != width:
        yield (
            f"the embeddings in {folder} have width {found}, but the network takes {width}: they are of another"
            f" encoder than the model's. Delete the folder and encode the captions with the model's: {cure}"
        )


def require_text(net: DiT, text_B_S_E: Tensor, name: str) -> None:
    """Raise for embeddings of a batch, called ``name``, that the network does not take."""
    if (width := text_B_S_E.shape[-1]) != net.text_channels:
        raise DataError(
            f"{name} have width {width}, but the network takes {net.text_channels}: "
            + (
                "encode the captions with the text encoder that it was trained with."
                if text_B_S_E.any()
                else f"they are zeros, made by the data set (text_width={net.text_channels} of it)."
            )
        )
    try:
        net.require_readable(text_B_S_E)
    except ValueError as error:
        raise DataError(
            f"{name} say something. {error} Leave out the captions (dataset.captions=false in the toy world), or set"
            " model.config.pipe_config.net.reads_text=true."
        ) from error


def encoder_for(width: int, num_tokens: int = NUM_TOKENS) -> str:
    """The encoder that captions are encoded with for a network of this text width: T5, or else the weight-free one."""
    return "t5" if width == RELEASED_WIDTH else BytesEncoder(num_tokens, width).name
