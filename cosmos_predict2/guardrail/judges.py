# SPDX-License-Identifier: Apache-2.0
"""The guardrails that are networks: Llama-Guard-3 judges prompts, the video filter of Cosmos-Guardrail1 frames.

Both are read from their public folders, every name of the weights accounted for. With ``offload`` they wait in host
memory and are on the GPU for a judgement alone.
"""

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from cosmos_predict2.interfaces import Guardrail, Verdict
from cosmos_predict2.text import pretrained, qwen_vl
from imaginaire import distributed, storage
from imaginaire.checkpoint import weights
from imaginaire.checkpoint.weight_files import shape_of
from imaginaire.errors import CheckpointError

HAZARDS = (  # MLCommons' taxonomy, S1 to S13, and S14 of Llama-Guard
    *("violent crimes", "non-violent crimes", "sex crimes", "child exploitation", "defamation", "specialized advice"),
    *("privacy", "intellectual property", "indiscriminate weapons", "hate", "self-harm", "sexual content"),
    *("elections", "code interpreter abuse"),
)
FRAME_CLASSES = ("safe", "sexual content", "violence", "drugs", "child abuse", "hate and harassment", "self-harm")
MAX_NEW_TOKENS = 100
SIGLIP = "models--google--siglip-so400m-patch14-384"  # a folder of the hub's cache inside that of the filter
_AT_ONCE = 8  # frames


@contextlib.contextmanager
def at_work(model: nn.Module, offload: bool) -> Iterator[torch.device]:
    """The model on the device of this process, and on the host again afterwards where it is offloaded."""
    device = distributed.device()
    model.to(device)
    try:
        with torch.no_grad():
            yield device
    finally:
        if offload:
            model.to("cpu")


class LlamaGuard(Guardrail):
    """Objects to prompts that the model answers with "unsafe", and to an answer that is no verdict."""

    name = "llama_guard"

    def __init__(self, folder: str, offload: bool = True) -> None:
        package = pretrained.transformers()
        self.source, self._offload = folder, offload
        self._tokenizer = pretrained.from_folder(package.AutoTokenizer, folder)
        if not self._tokenizer.chat_template:
            raise CheckpointError(f"{folder}: its tokenizer has no chat template, which holds the question.")
        config = pretrained.config_of(package.LlamaConfig, folder)
        make = package.LlamaForCausalLM
        self._model: Any = pretrained.load(lambda: make(config), weights.read(folder), folder, dtype=None, device="cpu")
        # Its tables are in no file, and must not be rounded to the weights' dtype.
        inner: Any = self._model.model
        inner.rotary_emb = type(inner.rotary_emb)(config=config)
        if storage.exists(storage.join(folder, "generation_config.json")):
            self._model.generation_config = pretrained.from_folder(package.GenerationConfig, folder)

    def check_prompt(self, prompt: str) -> Verdict:
        chat = [{"role": "user", "content": qwen_vl.plain(prompt)}]  # no turn ends inside it
        text = self._tokenizer.apply_chat_template(chat, tokenize=False)
        asked = self._tokenizer(text, add_special_tokens=False, return_tensors="pt")
        with at_work(self._model, self._offload) as device:
            given = {key: asked[key].to(device) for key in ("input_ids", "attention_mask")}
            made = self._model.generate(**given, do_sample=False, max_new_tokens=MAX_NEW_TOKENS)
        return verdict_of(self._tokenizer.decode(made[0, given["input_ids"].shape[1] :], skip_special_tokens=True))


def verdict_of(answer: str) -> Verdict:
    """The verdict of an answer, "safe" or "unsafe" with the codes of hazards on the next line."""
    first, *codes = answer.replace(",", " ").split() or [""]
    if first == "safe":
        return Verdict(True)
    if first != "unsafe":
        return Verdict(False, f"the answer {answer[:60]!r} is no verdict")
    known = {f"S{i}": hazard for i, hazard in enumerate(HAZARDS, start=1)}
    return Verdict(False, f"the prompt is unsafe ({', '.join(known.get(code, code) for code in codes) or 'no code'})")


class VideoFilter(Guardrail):
    """Objects to a video of which one frame is of a class other than safe."""

    name = "video_filter"

    def __init__(self, folder: str, offload: bool = True) -> None:
        package = pretrained.transformers()
        self.source, self._offload = folder, offload
        encoder = _snapshot(storage.join(folder, SIGLIP))
        config = pretrained.config_of(package.SiglipConfig, encoder).vision_config
        vision = package.SiglipVisionModel(config).float()
        inner = getattr(vision, "vision_model", vision)  # of older versions of the package
        names = "vision_model."  # the text half is not needed
        source = weights.renamed(weights.read(encoder), lambda n: n.removeprefix(names) if names in n else None)
        weights.load_into(inner.state_dict(), source).require(source=encoder)
        path = storage.join(folder, "safety_filter.pt")
        layers = weights.renamed(weights.read(path), lambda name: name.rpartition("network.layers.")[2])
        if not {"0.weight", "3.weight"} <= layers.keys():
            raise CheckpointError(f"{path} is no filter of the release: it has no network.layers.0 and 3.")
        widths = config.hidden_size, *(shape_of(layers, f"{i}.weight")[0] for i in (0, 3)), len(FRAME_CLASSES)
        linears = [nn.Linear(inner, outer) for inner, outer in itertools.pairwise(widths)]
        hidden = [(linear, nn.BatchNorm1d(linear.out_features), nn.ReLU()) for linear in linears[:-1]]
        classifier = nn.Sequential(*itertools.chain(*hidden), linears[-1])
        weights.load_into(classifier.state_dict(), layers).require(source=path)
        self._size = int(config.image_size)
        self._model = nn.ModuleDict({"vision": vision, "classifier": classifier}).eval().requires_grad_(False)

    def check_video(self, frames_F_H_W_C: Tensor) -> Verdict:
        classes: list[int] = []
        with at_work(self._model, self._offload) as device:
            for frames in frames_F_H_W_C.split(_AT_ONCE):
                pictures = frames.to(device).permute(0, 3, 1, 2).float()
                pictures = functional.interpolate(pictures, (self._size, self._size), mode="bicubic", antialias=True)
                pictures = pictures.round().clamp(0, 255) / 127.5 - 1
                features = self._model["vision"](pixel_values=pictures).pooler_output
                logits = self._model["classifier"](functional.normalize(features, dim=-1))
                if not logits.isfinite().all():
                    return Verdict(False, "the filter gives numbers that are not finite")
                classes += logits.argmax(dim=-1).tolist()
        objections = (f"frame {i} shows {FRAME_CLASSES[kind]}" for i, kind in enumerate(classes) if kind)
        message = next(objections, "")
        return Verdict(not message, message)


def _snapshot(cached: str) -> str:
    """The folder of the only revision that a folder of the hub's cache holds."""
    snapshots = storage.join(cached, "snapshots")
    names = storage.listdir(snapshots) if storage.is_folder(snapshots) else []
    if len(names) != 1:
        raise CheckpointError(f"{cached}: expected one snapshot of SigLIP, found {len(names)}. Repeat the download.")
    return storage.join(snapshots, names[0])
