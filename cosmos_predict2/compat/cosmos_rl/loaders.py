# SPDX-License-Identifier: Apache-2.0
"""The data loaders of a recipe for world models: a folder of clips, mock videos, or shards."""

from typing import Any

from cosmos_predict2.compat.fields import Fields, require_one_of, shown_value
from cosmos_predict2.data.sizes import TOY_RESOLUTION, size_of
from imaginaire.errors import ConfigError


def loader_settings(fields: Fields, warnings: list[str], *, reads_captions: bool) -> tuple[list[str], dict[str, Any]]:
    """The groups that are chosen and the keys that are set, of both loaders; validation's where the run validates."""
    choices: list[str] = []
    settings: dict[str, Any] = {}
    for loader in ("dataloader_train", "dataloader_val"):
        if loader == "dataloader_val" and not fields["trainer.run_validation"]:
            choices.append("dataloader_val=null")
            continue
        kind, section = fields[f"{loader}.type"], f"{loader}.video_dataloader"
        require_one_of(f"{loader}.type", kind, ("local", "web"))
        if fields[f"{loader}.image_dataloader.ratio"] or not fields[f"{section}.ratio"]:
            raise ConfigError(
                f"{loader}: the ratio of image_dataloader must be 0 and that of video_dataloader above 0, because"
                f" rewards are of videos. Set {loader}.image_dataloader.ratio = 0 and {section}.ratio = 1."
            )
        if kind == "local":
            group, dataset = "folder", _folder(fields, section, warnings, reads_captions)
        else:
            section = f"{section}.dataloader"
            group, dataset = _shards_or_mock(fields, section, reads_captions)
        choices.append(f"{loader}={group}")
        workers = fields[f"{section}.num_workers"]
        settings |= {
            f"{loader}.batch_size": fields[f"{section}.batch_size"],
            f"{loader}.num_workers": workers,
            f"{loader}.pin_memory": fields[f"{section}.pin_memory"],
            f"{loader}.prefetch_factor": fields[f"{section}.prefetch_factor"] if workers else None,
            **{f"{loader}.dataset.{name}": value for name, value in dataset.items()},
        }
    return choices, settings


def _folder(fields: Fields, section: str, warnings: list[str], reads_captions: bool) -> dict[str, Any]:
    folder, size = fields[f"{section}.dataset_dir"], fields[f"{section}.video_size"]
    if len(size) != 2 or not all(isinstance(side, int) for side in size):
        raise ConfigError(f"{section}.video_size = {size}, but it is two whole numbers: [height, width].")
    height, width = size
    if not folder:
        raise ConfigError(f"{section}.dataset_dir is missing: name the folder that has metas/ and videos/.")
    if not reads_captions and not fields[f"{section}.offline_text_embedding"]:
        raise ConfigError(
            f"{section}.offline_text_embedding = false, but the model does not encode captions: set it to true and"
            ' encode them by scripts.get_t5_embeddings, or set model.text_encoder_class = "reason1_7B" and'
            " model.text_encoder_config.compute_online = true."
        )
    if height > width:
        warnings.append(
            f"{section}.video_size = [{height}, {width}] is height and width, so that clips are stretched to portrait,"
            f" as they are there; for landscape write [{width}, {height}]"
        )
    return {
        "dataset_dir": folder,
        "num_frames": fields[f"{section}.num_frames"],
        "video_size": [height, width],
        "text_encoder": "none" if reads_captions else None,
    }


def _shards_or_mock(fields: Fields, section: str, reads_captions: bool) -> tuple[str, dict[str, Any]]:
    """The group of shards, or of mock videos, and its data set."""
    resolution = str(fields[f"{section}.dataset.resolution"])
    size = size_of(resolution, "1:1" if resolution == TOY_RESOLUTION else "16:9")
    clips = {"num_frames": fields[f"{section}.dataset.num_video_frames"], "video_size": list(size)}
    if not fields[f"{section}.webdataset"]:
        text = {"num_tokens": fields[f"{section}.dataset.len_t5"], "width": fields[f"{section}.dataset.t5_dim"]}
        return "mock_video", {**clips, **text}
    shards = fields[f"{section}.dataset.dataset_name"]
    if not str(shards).endswith(".tar"):
        raise ConfigError(
            f"{section}.dataset.dataset_name = {shown_value(shards)}: the data sets of such names were not published."
            ' Name shards, such as "s3://BUCKET/FOLDER/{00000..00127}.tar" or "/data/*.tar".'
        )
    return "shards", {**clips, "shards": [shards], "text_encoder": "none" if reads_captions else None}
