# SPDX-License-Identifier: Apache-2.0
"""Visual quality, motion quality and text alignment of a video, judged by VideoAlign (KwaiVGI/VideoReward).

A Qwen2-VL-2B reads the video and an instruction that holds three tokens of its own; a linear head turns the network's
output at each of them into a score. The public folder has ``model_config.json`` and ``checkpoint-N/`` with
``model.pth`` (all weights, adapters beside them) and ``tokenizer/``.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from cosmos_predict2.checkpoints.adapters import merge_lora_state
from cosmos_predict2.rl.interfaces import Clips
from cosmos_predict2.rl.rewards.judges import qwen_video
from cosmos_predict2.text import pretrained, qwen_vl
from cosmos_predict2.text.qwen_vl import FRAMES, SIDE
from imaginaire import foreign_json
from imaginaire.checkpoint import weight_files, weights
from imaginaire.errors import CheckpointError, raised_as

MODEL = "KwaiVGI/VideoReward"
BASE = "Qwen/Qwen2-VL-2B-Instruct"
SYSTEM = "You are a helpful assistant."  # Qwen's template has it where a chat has none
NAMES = ("VQ", "MQ", "TA")
TOKENS = tuple(f"<|{name}_reward|>" for name in NAMES)
TEXT = "{text_prompt}"
MIN_PIXELS, MIN_FRAMES, MAX_FRAMES = 128 * SIDE**2, 4, 768
EMBEDDINGS = "model.language_model.embed_tokens.weight"
# In our words: the wording that the model was trained with belongs to its publisher (``instruction_path``).
INSTRUCTION = """Rate a generated video from 0 to 10 in three ways, each by itself.

Visual Quality: are the pictures plausible, clear, rich in detail and pleasing? Harmful content is rated lowest.
Visual Quality: <|VQ_reward|>

Motion Quality: is the motion steady, natural, smooth and large enough? A video that hardly moves is rated low.
Motion Quality: <|MQ_reward|>

Text Alignment: do subject, motion, surroundings, style and camera follow the text?
Text: {text_prompt}
Text Alignment: <|TA_reward|>
"""


class VideoAlign:
    """``overall_reward``, the sum of ``vq_reward``, ``mq_reward`` and ``ta_reward``, each relative to its training set.

    ``model_path`` is a folder in the public layout or an id of the hub; the architecture is that of ``base_path``.
    ``instruction_path`` is a file with the published instruction: with ours the scores are near the published ones, not
    equal. It has the three tokens, and ``{text_prompt}`` where the clip's prompt goes.
    """

    needs_pixels = True

    def __init__(
        self,
        model_path: str = MODEL,
        device: str = "",
        dtype: str = "",
        base_path: str = BASE,
        instruction_path: str = "",
        clips_at_once: int = 4,
    ) -> None:
        package = pretrained.transformers()
        place = qwen_video.place_and_dtype(device, dtype)
        checkpoint = _newest_checkpoint(model_path)
        self.settings = _settings(model_path)
        self.clips_at_once = clips_at_once
        self.instruction = qwen_video.wording("instruction_path", instruction_path, INSTRUCTION, [*TOKENS, TEXT])
        config = pretrained.config_of(package.AutoConfig, base_path)
        subfolder = f"{checkpoint}/tokenizer"
        self.tokenizer: Any = pretrained.from_folder(package.AutoTokenizer, model_path, subfolder=subfolder)
        self.tokens = [self.tokenizer.convert_tokens_to_ids(token) for token in TOKENS]
        self.network = _network(weight_files.below(model_path, checkpoint), config, self.settings, place)

    def __call__(self, clips: Clips, context: Mapping[str, Any]) -> Mapping[str, Tensor]:
        scores_B_3 = qwen_video.in_batches(clips, self._question, self._scores, self.clips_at_once)
        parts = {f"{name.lower()}_reward": scores_B_3[:, i] for i, name in enumerate(NAMES)}
        overall_B = scores_B_3.sum(dim=1)
        return {"value": overall_B, **parts, "overall_reward": overall_B}

    def _question(self, video_C_F_H_W: Tensor, fps: float, prompt: str) -> qwen_vl.VideoQuestion:
        data = self.settings["data_config"]
        chosen = evenly_spaced(video_C_F_H_W.shape[1], fps, float(data["fps"]))
        frames_F_C_H_W = video_C_F_H_W[:, chosen].permute(1, 0, 2, 3)
        patches = qwen_vl.patches_of(frames_F_C_H_W, MIN_PIXELS, int(data["max_frame_pixels"]))
        text = qwen_vl.conversation(SYSTEM, self.instruction.replace(TEXT, qwen_vl.plain(prompt)))
        return qwen_vl.question_of(self.tokenizer, text, patches, self.network.model.config.video_token_id)

    @torch.no_grad()
    def _scores(self, batch: Sequence[qwen_vl.VideoQuestion]) -> Tensor:
        """[B, 3]: the scores, as deviations from the mean of the training set."""
        model = self.network.model
        given = qwen_vl.model_input(batch, model.config.video_token_id, model)
        ids_B_S = given["input_ids"]
        # It was trained with the plain order of the tokens as positions, without height and width.
        positions_3_B_S = torch.arange(ids_B_S.shape[1], device=ids_B_S.device).expand(3, len(batch), -1)
        hidden_B_S_D = model(**given, position_ids=positions_3_B_S, use_cache=False).last_hidden_state
        read_B_3_D = torch.stack(
            [
                torch.stack([hidden[ids == token][0] for token in self.tokens])
                for hidden, ids in zip(hidden_B_S_D, ids_B_S)
            ]
        )
        scores_B_3_N = self.network.rm_head(read_B_3_D)
        has_output_each = scores_B_3_N.shape[2] == len(NAMES)
        scores_B_3 = scores_B_3_N.diagonal(dim1=1, dim2=2) if has_output_each else scores_B_3_N[:, :, 0]
        known = self.settings.get("inference_config") or {}
        mean_3 = torch.tensor([float(known.get(f"{name}_mean", 0.0)) for name in NAMES])
        std_3 = torch.tensor([float(known.get(f"{name}_std", 1.0)) for name in NAMES])
        return (scores_B_3.float().cpu() - mean_3) / std_3


def evenly_spaced(num_frames: int, fps: float, wanted_fps: float) -> list[int]:
    """Indices of an even number of frames from the first to the last, ``wanted_fps`` of them a second, at least 4."""
    most = min(MAX_FRAMES, num_frames) // FRAMES * FRAMES
    number = min(max(num_frames / fps * wanted_fps, MIN_FRAMES), most)
    even = max(1, round(number / FRAMES) * FRAMES)
    return [round(float(place)) for place in torch.linspace(0, num_frames - 1, even)]


class _Network(nn.Module):
    """Qwen2-VL without its words, and the head of the rewards."""

    def __init__(self, config: Any, num_outputs: int) -> None:
        super().__init__()
        from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLModel

        self.model: Any = Qwen2VLModel(config)
        self.rm_head = nn.Linear(config.text_config.hidden_size, num_outputs, bias=False)


def _network(
    folder: str, config: Any, settings: Mapping[str, Any], place: tuple[torch.device, torch.dtype]
) -> _Network:
    path = weight_files.below(folder, "model.pth")
    lora = settings["peft_lora_config"]
    if lora.get("use_rslora"):
        raise CheckpointError(f"{folder}: use_rslora scales its adapters in a way that is not read here.")
    merged = merge_lora_state(weights.read(path), float(lora["lora_alpha"]), where=path, dtype=place[1])
    source = weights.renamed(merged, weight_name)
    for name in (EMBEDDINGS, "rm_head.weight"):
        if name not in source:
            raise CheckpointError(f"{path} is not VideoAlign: it has no {name}.")
    config.text_config.vocab_size = weight_files.shape_of(source, EMBEDDINGS)[0]  # the reward's tokens are among them
    num_outputs = weight_files.shape_of(source, "rm_head.weight")[0]
    return qwen_video.loaded(lambda: _Network(config, num_outputs), source, path, place)  # type: ignore[no-any-return]


def weight_name(name: str) -> str | None:
    """A weight's name in transformers today, from those of the release; None for the words, which judge nothing."""
    name = name.removeprefix("base_model.model.")
    if name.startswith(("rm_head.", "model.visual.", "model.language_model.")):
        return name
    if name.startswith("visual."):
        return f"model.{name}"
    return None if name.startswith("lm_head.") else name.replace("model.", "model.language_model.", 1)


def _newest_checkpoint(model_path: str) -> str:
    found = [name for name in weight_files.names_at(model_path) if name.startswith("checkpoint-")]
    if not found:
        raise CheckpointError(f"{model_path} has no folder checkpoint-N, so it is no judge in VideoAlign's layout.")
    return max(found, key=lambda name: int(name.rpartition("-")[2]) if name.rpartition("-")[2].isdecimal() else -1)


def _settings(model_path: str) -> dict[str, Any]:
    """Records of the release about its data, its adapters and the distribution of its scores."""
    place = weight_files.below(model_path, "model_config.json")
    with raised_as(CheckpointError, f"{place} is not VideoAlign's", ValueError, KeyError, TypeError):
        found = foreign_json.load(weight_files.local_file(place))
        fps, pixels, alpha = (
            found["data_config"]["fps"],
            found["data_config"]["max_frame_pixels"],
            found["peft_lora_config"]["lora_alpha"],
        )
    if not all(isinstance(one, (int, float)) and 0 < one < math.inf for one in (fps, pixels, alpha)):
        raise CheckpointError(f"{place}: fps, max_frame_pixels and lora_alpha are numbers above 0.")
    return found  # type: ignore[no-any-return]
