# SPDX-License-Identifier: Apache-2.0
"""The data loaders of a recipe for world models: a folder of clips, mock videos, or shards."""

from dataclasses import dataclass, field
from typing import Any

from cosmos_predict2.compat.fields import Fields, shown_value
from cosmos_predict2.data.sizes import TOY_RESOLUTION, size_of
from imaginaire.errors import ConfigError


@dataclass
class Data:
    """The groups that are chosen, and the keys that are set in them."""

    choices: list[str] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)


def data_settings(fields: Fields, warnings: list[str], *, reads_captions: bool) -> Data:
    """Both loaders; that of validation only where the run validates."""
    data = Data()
    _add(data, fields, "dataloader_train", warnings, reads_captions)
    if fields["trainer.run_validation"]:
        _add(data, fields, "dataloader_val", warnings, reads_captions)
    else:
        data.choices.append("dataloader_val=null")
    return data


def _add(data: Data, fields: Fields, loader: str, warnings: list[str], reads_captions: bool) -> None:
    kind, section = fields[f"{loader}.type"], f"{loader}.video_dataloader"
    if kind not in ("local", "web"):
        raise ConfigError(f'{loader}.type = {shown_value(kind)}, but it is "local" or "web".')
    if fields[f"{loader}.image_dataloader.ratio"] or not fields[f"{section}.ratio"]:
        raise ConfigError(
            f"{loader}: the ratio of image_dataloader must be 0 and that of video_dataloader above 0, because rewards"
            f" are of videos. Set {loader}.image_dataloader.ratio = 0 and {section}.ratio = 1."
        )
    if kind == "local":
        _add_folder(data, fields, loader, section, warnings, reads_captions)
    else:
        _add_web(data, fields, loader, f"{section}.dataloader", reads_captions)


def _add_folder(
    data: Data, fields: Fields, loader: str, section: str, warnings: list[str], reads_captions: bool
) -> None:
    folder, (height, width) = fields[f"{section}.dataset_dir"], _pair(fields, f"{section}.video_size")
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
    data.choices.append(f"{loader}=folder")
    data.settings |= _loader_settings(fields, loader, section) | {
        f"{loader}.dataset.dataset_dir": folder,
        f"{loader}.dataset.num_frames": fields[f"{section}.num_frames"],
        f"{loader}.dataset.video_size": [height, width],
        f"{loader}.dataset.text_encoder": "none" if reads_captions else None,
    }


def _add_web(data: Data, fields: Fields, loader: str, section: str, reads_captions: bool) -> None:
    """Shards, or mock videos."""
    resolution = str(fields[f"{section}.dataset.resolution"])
    data.settings |= _loader_settings(fields, loader, section) | {
        f"{loader}.dataset.num_frames": fields[f"{section}.dataset.num_video_frames"],
        f"{loader}.dataset.video_size": list(size_of(resolution, "1:1" if resolution == TOY_RESOLUTION else "16:9")),
    }
    if not fields[f"{section}.webdataset"]:
        data.choices.append(f"{loader}=mock_video")
        data.settings[f"{loader}.dataset.num_tokens"] = fields[f"{section}.dataset.len_t5"]
        data.settings[f"{loader}.dataset.width"] = fields[f"{section}.dataset.t5_dim"]
        return
    shards = fields[f"{section}.dataset.dataset_name"]
    if not str(shards).endswith(".tar"):
        raise ConfigError(
            f"{section}.dataset.dataset_name = {shown_value(shards)}: the data sets of such names were not published."
            ' Name shards, such as "s3://BUCKET/FOLDER/{00000..00127}.tar" or "/data/*.tar".'
        )
    data.choices.append(f"{loader}=shards")
    data.settings[f"{loader}.dataset.shards"] = [shards]
    data.settings[f"{loader}.dataset.text_encoder"] = "none" if reads_captions else None


def _loader_settings(fields: Fields, loader: str, section: str) -> dict[str, Any]:
    workers = fields[f"{section}.num_workers"]
    return {
        f"{loader}.batch_size": fields[f"{section}.batch_size"],
        f"{loader}.num_workers": workers,
        f"{loader}.pin_memory": fields[f"{section}.pin_memory"],
        f"{loader}.prefetch_factor": fields[f"{section}.prefetch_factor"] if workers else None,
    }


def _pair(fields: Fields, path: str) -> tuple[int, int]:
    value = fields[path]
    if len(value) != 2 or not all(isinstance(side, int) for side in value):
        raise ConfigError(f"{path} = {value}, but it is two whole numbers: [height, width].")
    return value[0], value[1]
