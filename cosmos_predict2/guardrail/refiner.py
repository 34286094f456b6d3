# SPDX-License-Identifier: Apache-2.0
"""The prompt refiner: Cosmos-Reason1-7B, a Qwen2.5-VL, writes a prompt out, given the frames that a video begins with.

A draw of the model depends on the seed alone. An answer that cannot be used (none, one that repeats itself, one that
has no end) leaves the prompt as it was written, with a warning: the prompt is good enough where there is no refiner.
"""

import logging
import re
from collections import Counter
from typing import Any

import torch
from torch import Tensor

from cosmos_predict2.guardrail.judges import at_work
from cosmos_predict2.text import pretrained, qwen_vl
from imaginaire import storage
from imaginaire.checkpoint import weights

log = logging.getLogger(__name__)

MAX_NEW_TOKENS = 512
FPS = 16  # of the released models
LEAST, MOST = 256 * qwen_vl.SIDE**2, 1280 * qwen_vl.SIDE**2  # pixels of a frame that the model sees
# In our words: the wording of the publisher belongs to it.
SYSTEM = """You write prompts for a model that makes videos. You get a short request and the picture or clip that the \
video begins with. Write the request out in one paragraph of 80 to 100 English words, with ASCII characters only. Name \
what is seen: the scene, the objects with their colours, materials and places, the light. Then say what moves, how and \
in which order, and whether the camera moves. Keep all that the request asks for, and keep words in quotation marks as \
they are. Add nothing that contradicts the picture, and no new events. The answer is the paragraph alone: no title, no \
list, no remarks."""
_SPACES = "ĠĊĉč"  # how a byte-level vocabulary writes space, newline, tab and return
LOOP_WORDS, MOST_REPEATS, LONGEST_WORD = 6, 2, 60  # so many words in a row stand no oftener in a prompt


class UnusableAnswerError(ValueError):
    """An answer that is no prompt; the message says why."""


class Reason1Refiner:
    """Writes prompts out by the model of a public folder; with ``offload`` it waits in host memory between uses."""

    def __init__(self, folder: str, offload: bool = True) -> None:
        package = pretrained.transformers()
        self._offload = offload
        self._tokenizer = pretrained.from_folder(package.AutoTokenizer, folder)
        config = pretrained.config_of(package.Qwen2_5_VLConfig, folder)
        make = package.Qwen2_5_VLForConditionalGeneration
        source = weights.renamed(weights.read(folder), _name)
        model: Any = pretrained.load(lambda: make(config), source, folder, dtype=None, device="cpu")
        # Its tables are in no file, and must not be rounded to the weights' dtype.
        text, vision = model.model.language_model, model.model.visual
        text.rotary_emb = type(text.rotary_emb)(config=config.text_config)
        vision.rotary_pos_emb = type(vision.rotary_pos_emb)(config.vision_config)
        self._model = model
        if storage.exists(storage.join(folder, "generation_config.json")):
            self._model.generation_config = pretrained.from_folder(package.GenerationConfig, folder)
        vocabulary = self._tokenizer.get_vocab().items()
        self._foreign = [i for token, i in vocabulary if not all(c.isascii() or c in _SPACES for c in token)]

    def refine(self, prompt: str, frames_C_F_H_W: Tensor, seed: int = 0) -> str:
        answer, has_end = self.answer(prompt, frames_C_F_H_W, seed)
        try:
            if not has_end:
                raise UnusableAnswerError(f"it has no end after {MAX_NEW_TOKENS} tokens")
            return prompt_of(answer)
        except UnusableAnswerError as why:
            log.warning("prompt refiner: the prompt stays as written, for the answer %r: %s", answer[:80], why)
            return prompt

    def answer(self, prompt: str, frames_C_F_H_W: Tensor, seed: int = 0) -> tuple[str, bool]:
        """The model's own words, and True where they come to an end."""
        count = frames_C_F_H_W.shape[1]
        frames_F_C_H_W = frames_C_F_H_W[:, -(count // qwen_vl.FRAMES * qwen_vl.FRAMES or 1) :].permute(1, 0, 2, 3).cpu()
        patches = qwen_vl.patches_of(frames_F_C_H_W, LEAST, MOST)
        text = qwen_vl.conversation(SYSTEM, qwen_vl.plain(prompt))
        video_token = self._model.config.video_token_id
        question = qwen_vl.question_of(self._tokenizer, text, patches, video_token)
        with at_work(self._model, self._offload) as device:
            given = qwen_vl.model_input([question], video_token, self._model)
            pace_B = torch.tensor([qwen_vl.FRAMES / FPS], device=device)
            with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
                torch.manual_seed(seed)
                made = self._model.generate(
                    **given,
                    second_per_grid_ts=pace_B,
                    max_new_tokens=MAX_NEW_TOKENS,
                    suppress_tokens=self._foreign,
                )
        new = made[0, len(question.ids) :]
        return self._tokenizer.decode(new, skip_special_tokens=True), len(new) < MAX_NEW_TOKENS


def prompt_of(answer: str) -> str:
    """The prompt of an answer, on one line: what is in its answer tags, else what follows its reasoning."""
    tagged = re.search("<answer>(.*?)(</answer>|$)", answer, re.DOTALL)
    text = " ".join((tagged[1] if tagged else answer.rpartition("</think>")[2]).split())
    if "<think>" in text:
        raise UnusableAnswerError("its reasoning has no end")
    if not any(letter.isalpha() for letter in text):
        raise UnusableAnswerError("it has no words")
    words = text.lower().split()
    if max(map(len, words)) > LONGEST_WORD:
        raise UnusableAnswerError(f"it has a word of more than {LONGEST_WORD} letters")
    runs = Counter(zip(*(words[first:] for first in range(LOOP_WORDS)), strict=False))
    run, count = max(runs.items(), key=lambda one: one[1], default=((), 0))
    if count > MOST_REPEATS:
        raise UnusableAnswerError(f"it has '{' '.join(run)}' {count} times")
    return text


def _name(name: str) -> str:
    """A weight's name as transformers has it, from the public one, which has neither of the two parts' prefixes."""
    for public, prefix in (("visual.", "model.visual."), ("model.", "model.language_model.")):
        if name.startswith(public) and not name.startswith(("model.visual.", "model.language_model.")):
            return prefix + name.removeprefix(public)
    return name
