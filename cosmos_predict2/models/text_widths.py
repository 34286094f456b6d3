# SPDX-License-Identifier: Apache-2.0
"""How wide texts are, told from a configuration: what the network reads, and what an encoder or the data will give."""

from collections.abc import Iterator, Mapping
from typing import Any

from cosmos_predict2.text.constant_embedding import constant_embedding_shape
from imaginaire import lazy_config, storage
from imaginaire.errors import UserError
from imaginaire.names import target_of

RELEASED_WIDTH = 1024  # of T5-11B; the network's own default
PROJECTION = "crossattn_proj_in_channels"


def network_text_width(net: Mapping[str, Any]) -> int:
    """How wide the text is that a network's lazy node reads."""
    return int(net.get(PROJECTION) or net.get("crossattn_emb_channels") or RELEASED_WIDTH)


def encoder_text_width(node: Any) -> int | None:
    """How wide the texts of an encoder's lazy node will be, where its class can tell before it is built; of an encoder
    that stands there itself, how wide they are."""
    if not isinstance(node, Mapping):
        width: int | None = getattr(node, "width", None)
        return width
    declared = getattr(target_of(node), "declared_width", None)
    if not callable(declared):
        return None
    try:
        width = declared(**{str(key): value for key, value in node.items() if not str(key).startswith("_")})
    except (UserError, TypeError):  # TypeError: without an argument that it must have
        return None  # building it says why
    return width


def data_text_width(data: Mapping[str, Any]) -> tuple[str, int] | None:
    """The argument of a data set that says how wide the texts are that it makes, and its value; None where none does,
    or where it reads texts, whose files say it."""
    parameters = lazy_config.signature(target_of(data))
    if "num_tokens" not in parameters or data.get("load_t5_embeddings"):
        return None
    # Beside a height, "width" is one of pixels.
    for name in ("text_width",) if "height" in parameters else ("text_width", "width"):
        if name in parameters:
            value = data.get(name, parameters[name].default)
            return (name, value) if isinstance(value, int) else None
    return None


def text_problems(text: Mapping[str, Any], net: Mapping[str, Any]) -> Iterator[str]:
    """What is wrong with the text of a training run (``model.config.text``) for a network; reads headers alone."""
    key, wanted = "model.config.text", network_text_width(net)
    cure = f"Choose the encoder of the network's weights, or another network ({PROJECTION} says what it reads)"
    path = text.get("constant_path") or ""
    if text.get("encoder") is not None:
        width = encoder_text_width(text["encoder"])
        if width is not None and width != wanted:
            yield f"{key}.encoder: its texts have width {width}, but the network takes {wanted}. {cure}"
    elif path and not storage.is_remote(path) and storage.exists(path):
        try:
            _, width = constant_embedding_shape(path)
        except UserError as error:
            yield f"{key}.constant_path: {str(error).rstrip('.')}"
            return
        if width != wanted:
            yield f"{key}.constant_path: {path} has width {width}, but the network takes {wanted}. {cure}"
