# SPDX-License-Identifier: Apache-2.0
"""Pictures and videos as uint8 tensors: reading, writing, and bringing them to a size.

A picture is [3, H, W], a clip [3, F, H, W], both RGB. Whatever is wrong with a file is a `DataError` that names it.
Paths may be remote; what is written appears complete or not at all.
"""

import io
import os
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from imaginaire import storage
from imaginaire.errors import CheckpointError, DataError, missing_package, raised_as
from imaginaire.storage.object_store import StrPath

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp")
VIDEO_SUFFIXES = (".mp4", ".mov", ".mkv", ".webm", ".avi")
WRITTEN_VIDEO_SUFFIXES = (".mp4",)

# Quality 18 is about where losses become visible, and what we write is trained on. Without mbtree: its AVX-512 code
# reads memory that nobody has written, so that the same frames gave two files now and then.
X264 = {"crf": "16", "preset": "medium", "x264-params": "mbtree=0"}
HD_HEIGHT = 720  # from this height on, players take untagged colours as BT.709
MOST_FPS = 100_000  # of a written video
LONGEST = 16  # times as long as the wanted shape: beyond that, a picture's ends are cut off before it is scaled
BT709 = 1  # the code of the standard's matrix, primaries and transfer in H.264 alike
UNSPECIFIED_COLOURS = 2
PLANAR_FORMATS = ("yuv420p", "yuvj420p", "yuv422p", "yuv444p")  # become planes of red, green, blue in one step
MPEG_RANGE = 1


@dataclass(frozen=True)
class VideoInfo:
    """Facts about a video file, without its pictures; the size is that of the pictures as shown."""

    num_frames: int
    fps: float
    height: int
    width: int


def kind_of(path: StrPath) -> Literal["image", "video"]:
    """Kind of a file by its suffix, in any case."""
    suffix = os.path.splitext(os.fspath(path))[1].lower()
    if suffix in IMAGE_SUFFIXES:
        return "image"
    if suffix in VIDEO_SUFFIXES:
        return "video"
    known = ", ".join([*IMAGE_SUFFIXES, *VIDEO_SUFFIXES])
    raise DataError(f"{path} {_suffix_in_words(suffix)}. Pictures and videos may be: {known}.")


def _suffix_in_words(suffix: str) -> str:
    return f"has the suffix '{suffix}'" if suffix else "has no suffix"


# ---- reading ---------------------------------------------------------------------------------------------------------


def read_image(path: StrPath) -> Tensor:
    """The picture as uint8 [3, H, W]: turned by its EXIF tag, transparency over black."""
    return decoded_picture(_existing(path, IMAGE_SUFFIXES, "picture"), str(path))


def decoded_picture(file: Path | BinaryIO, name: str) -> Tensor:
    """The picture of an open file, as `read_image` gives it; ``name`` stands in the error."""
    try:
        from PIL import Image, ImageOps, UnidentifiedImageError
    except ImportError as error:
        raise missing_package("pillow", "dev") from error

    try:
        with Image.open(file) as opened:
            picture = ImageOps.exif_transpose(opened)
            if picture.mode.startswith("I;16"):  # 16-bit grey: the upper byte, where convert() would cut off at 255
                picture = Image.fromarray((np.asarray(picture) >> 8).astype(np.uint8))
            if picture.has_transparency_data:
                rgba = picture.convert("RGBA")
                picture = Image.alpha_composite(Image.new("RGBA", rgba.size, (0, 0, 0, 255)), rgba)
            pixels = np.array(picture.convert("RGB"))
    except (UnidentifiedImageError, OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise DataError(f"{name} is not a picture that can be decoded: {error}") from error
    return torch.from_numpy(pixels).permute(2, 0, 1).contiguous()


def read_video(path: StrPath, *, first: int | None = None, last: int | None = None) -> tuple[Tensor, float]:
    """The frames as uint8 [3, F, H, W] and their rate: all of them, or the ``first`` or ``last`` n.

    Only the frames that are given back are held in memory. Fewer frames than required are an error.
    """
    assert first is None or last is None, "either the first or the last frames"
    wanted = first or last
    kept: deque[np.ndarray] = deque(maxlen=last)
    num_seen = 0
    with opened_video(path) as container:
        fps = frame_rate(container.streams.video[0], path)
        for frame in decoded_frames(container, path):
            kept.append(rgb_pixels(frame))
            num_seen += 1
            if num_seen == first:
                break
    if wanted is not None and num_seen < wanted:
        raise DataError(f"{path} has {num_seen} frames, but {wanted} are needed.")
    video = torch.from_numpy(np.stack(list(kept)))
    return video.permute(3, 0, 1, 2).contiguous(), fps


def iterate_frames(path: StrPath, every: int = 1) -> Iterator[Tensor]:
    """Every ``every``-th frame as uint8 [3, H, W], one at a time; a damaged one is an error."""
    with opened_video(path) as container:
        for number, frame in enumerate(decoded_frames(container, path)):
            if number % every == 0:
                yield torch.from_numpy(rgb_pixels(frame)).permute(2, 0, 1).contiguous()


def scan_video(path: StrPath) -> VideoInfo:
    """Facts about a video after decoding all of it: fewer frames than it states, or damaged ones, are errors."""
    num_packets, num_frames, size = 0, 0, (0, 0)
    with opened_video(path) as container:
        stream = container.streams.video[0]
        fps, stated = frame_rate(stream, path), stream.frames
        for packet in container.demux(stream):
            num_packets += bool(packet.size)
            for frame in packet.decode():
                if frame.is_corrupt:
                    raise DataError(f"{path} is damaged at frame {num_frames}.")
                size = (frame.width, frame.height) if _quarter_turns(frame) % 2 else (frame.height, frame.width)
                num_frames += 1
    if num_frames == 0:
        raise DataError(f"{path} holds no frame that can be decoded.")
    if num_packets < stated:  # not the frames: an edit list may leave some of them out
        raise DataError(f"{path} ends after {num_packets} of the {stated} frames that it states: it is cut off.")
    return VideoInfo(num_frames=num_frames, fps=fps, height=size[0], width=size[1])


def probe_video(path: StrPath) -> VideoInfo:
    """Number of frames, rate and size, without decoding more than the first frame."""
    with opened_video(path) as container:
        stream = container.streams.video[0]
        num_frames = stream.frames or sum(1 for packet in container.demux(stream) if packet.size)
        fps = frame_rate(stream, path)
    with opened_video(path) as container:
        height, width = rgb_pixels(next(decoded_frames(container, path))).shape[:2]
    return VideoInfo(num_frames=num_frames, fps=fps, height=height, width=width)


@contextmanager
def opened_video(path: StrPath) -> Iterator[Any]:
    """The container of an existing video; the decoder's errors become ours."""
    av = _av()
    local = _existing(path, VIDEO_SUFFIXES, "video")
    with raised_as(DataError, f"{path} is not a video that can be decoded", av.FFmpegError, OSError):
        with av.open(str(local)) as container:
            if not container.streams.video:
                raise DataError(f"{path} has no video stream.")
            container.streams.video[0].thread_type = "AUTO"
            yield container


def decoded_frames(container: Any, path: StrPath) -> Iterator[Any]:
    """All frames, one at least; a damaged one is an error."""
    number = -1
    for number, frame in enumerate(container.decode(video=0)):
        if frame.is_corrupt:
            raise DataError(f"{path} is damaged at frame {number}.")
        yield frame
    if number < 0:
        raise DataError(f"{path} holds no frame that can be decoded.")


def rgb_pixels(frame: Any) -> np.ndarray:
    """A decoded frame as uint8 [H, W, 3], turned as it is shown."""
    pixels: np.ndarray = frame.to_ndarray(format="rgb24", **_colours(frame))
    turns = _quarter_turns(frame)
    return np.ascontiguousarray(np.rot90(pixels, turns)) if turns else pixels


def rgb_planes(frame: Any, reformatter: Any, num_threads: int = 1) -> list[np.ndarray]:
    """The pixels of `rgb_pixels` as uint8 [H, W] of red, green and blue.

    One ``av.video.reformatter.VideoReformatter`` for all frames of a clip saves the tables that each would make anew.
    """
    options: dict[str, Any] = {**_colours(frame)}
    if int(_av().__version__.split(".")[0]) >= 17:  # converts in one thread per core by default; before in this one
        options["threads"] = num_threads
    # Of other widths swscale leaves the last columns of a plane unwritten.
    if frame.format.name in PLANAR_FORMATS and frame.height % 2 == 0 and frame.width % 16 == 0:
        planes = reformatter.reformat(frame, format="gbrp", **options).planes
        green, blue, red = (
            np.frombuffer(plane, np.uint8).reshape(-1, plane.line_size)[: plane.height, : plane.width]
            for plane in planes
        )
        colours = [red, green, blue]
    else:
        pixels = reformatter.reformat(frame, format="rgb24", **options).to_ndarray()
        colours = [pixels[..., i] for i in range(3)]
    turns = _quarter_turns(frame)
    return [np.rot90(colour, turns) for colour in colours] if turns else colours


def _colours(frame: Any) -> dict[str, str]:
    if frame.colorspace == UNSPECIFIED_COLOURS and frame.height >= HD_HEIGHT:
        return dict(src_colorspace="ITU709", dst_colorspace="ITU709")
    return {}


def _quarter_turns(frame: Any) -> int:
    """Turns by 90 degrees, anticlockwise, that show a frame upright, as of a phone that was held upright."""
    return round(getattr(frame, "rotation", 0) / 90) % 4


def frame_rate(stream: Any, path: StrPath) -> float:
    rate = stream.average_rate or stream.guessed_rate or stream.base_rate
    if not rate or rate <= 0:
        raise DataError(f"{path} has no number of frames per second.")
    return float(rate)


def _existing(path: StrPath, suffixes: Sequence[str], kind: str) -> Path:
    """The local file, after checking suffix and existence."""
    suffix = os.path.splitext(os.fspath(path))[1].lower()
    if suffix not in suffixes:
        raise DataError(f"{path} {_suffix_in_words(suffix)}; a {kind} has one of {', '.join(suffixes)}.")
    if not storage.exists(path):
        raise DataError(f"{path} does not exist; a {kind} was expected there.")
    if storage.is_folder(path):
        raise DataError(f"{path} is a folder; a {kind} was expected there.")
    return storage.local_copy(path)


# ---- writing ---------------------------------------------------------------------------------------------------------


def check_writable(
    path: StrPath, suffixes: Sequence[str] = (*IMAGE_SUFFIXES, *WRITTEN_VIDEO_SUFFIXES), *, flag: str = "place for it"
) -> None:
    """Make the folder of an output and raise unless a file can be written there; call it before heavy work."""
    suffix = os.path.splitext(os.fspath(path))[1].lower()
    if suffix not in suffixes:
        raise DataError(f"Output {path} {_suffix_in_words(suffix)}; it can be written as {', '.join(suffixes)}.")
    if storage.is_remote(path):
        return
    local = Path(path)
    if local.is_dir():
        raise DataError(f"Output {path} is a folder; give the name of a file.")
    trial = local.with_name(f".{local.name}.tmp-{os.getpid()}")
    try:
        local.parent.mkdir(parents=True, exist_ok=True)
        with trial.open("wb"):
            pass
        trial.unlink()
    except OSError as error:
        why = f"no file can be made in the folder {local.parent} ({error.strerror or error})"
        raise DataError(f"Output {path} cannot be written: {why}. Choose another {flag}.") from error


def write_image(path: StrPath, image: Tensor) -> None:
    """Write uint8 [3, H, W] in the format of the suffix."""
    from PIL import Image

    assert image.dtype == torch.uint8 and image.ndim == 3 and image.shape[0] == 3, (image.dtype, image.shape)
    check_writable(path, IMAGE_SUFFIXES)
    suffix = os.path.splitext(os.fspath(path))[1].lower()
    kind = {".jpg": "JPEG", ".jpeg": "JPEG", ".png": "PNG", ".webp": "WEBP"}[suffix]
    options: dict[str, Any] = {} if kind == "PNG" else {"quality": 95}
    encoded = io.BytesIO()
    Image.fromarray(image.permute(1, 2, 0).cpu().numpy()).save(encoded, format=kind, **options)
    _write_bytes(path, encoded)


def write_video(path: StrPath, video: Tensor, fps: float | Fraction) -> None:
    """Write uint8 [3, F, H, W] as an mp4 that plays everywhere: H.264 (MPEG-4 without libx264), 4:2:0, BT.709.

    Such files have even sides only: an odd side gets its last row or column twice. Rates such as 30000/1001 are exact.
    """
    av = _av()
    assert video.dtype == torch.uint8 and video.ndim == 4 and video.shape[0] == 3, (video.dtype, video.shape)
    rate = _exact_rate(fps)
    check_writable(path, WRITTEN_VIDEO_SUFFIXES)
    frames = video.permute(1, 2, 3, 0).cpu().numpy()
    num_frames, height, width, _ = frames.shape
    if num_frames == 0 or height == 0 or width == 0:
        raise DataError(f"{path}: a video of {num_frames} frames of {height}x{width} pixels cannot be written.")
    encoded = io.BytesIO()
    with raised_as(DataError, f"{path}: {num_frames} frames of {height}x{width} cannot be encoded", av.FFmpegError):
        with av.open(encoded, "w", format="mp4") as container:
            stream = mp4_stream(container, rate, height + height % 2, width + width % 2)
            codec = stream.codec_context
            codec.colorspace = codec.color_primaries = codec.color_trc = BT709
            codec.color_range = MPEG_RANGE
            for i, pixels in enumerate(frames):
                if height % 2 or width % 2:
                    pixels = np.pad(pixels, ((0, height % 2), (0, width % 2), (0, 0)), mode="edge")
                frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(pixels), format="rgb24")
                frame = frame.reformat(format="yuv420p", dst_colorspace="ITU709", dst_color_range="MPEG")
                frame.pts, frame.time_base = i, 1 / rate
                container.mux(stream.encode(frame))
            container.mux(stream.encode())
    _write_bytes(path, encoded)


def mp4_stream(container: Any, rate: Fraction, height: int, width: int) -> Any:
    """The stream of a new mp4: H.264, or MPEG-4 without libx264."""
    if "libx264" in _av().codecs_available:
        stream = container.add_stream("libx264", rate=rate, options=X264)
    else:
        stream = container.add_stream("mpeg4", rate=rate, options={"qscale": "2", "qmin": "1"})
    stream.height, stream.width, stream.pix_fmt = height, width, "yuv420p"
    return stream


def _exact_rate(fps: float | Fraction) -> Fraction:
    """The rate as a fraction: 29.97 and 23.976 are the broadcast rates that people mean."""
    if not 0 < fps <= MOST_FPS:
        raise DataError(f"A video cannot have {fps} frames per second: give a number above 0, up to {MOST_FPS}.")
    if isinstance(fps, Fraction):
        return fps
    broadcast = Fraction(round(fps * 1.001) * 1000, 1001)
    if broadcast and abs(float(broadcast) - fps) < 1e-3:
        return broadcast
    rate = Fraction(fps).limit_denominator(1000)
    if rate == 0:
        raise DataError(f"A video cannot have {fps} frames per second; 0.001 is the least.")
    return rate


def _write_bytes(path: StrPath, encoded: io.BytesIO) -> None:
    try:
        storage.write_bytes(path, encoded.getbuffer())
    except CheckpointError as error:  # storage raises errors of checkpoints; the cause is that of the disk
        raise DataError(f"{path} cannot be written: {error.__cause__ or error}") from error


def _av() -> Any:
    try:
        import av  # not by optional_module: it is asked for with every frame
    except ImportError as error:
        raise missing_package("av", "dev") from error
    return av


# ---- sizes -----------------------------------------------------------------------------------------------------------


def resize_and_crop(frames: Tensor, size: tuple[int, int]) -> Tensor:
    """Frames [..., H, W] scaled until both sides cover ``size`` = (height, width), then cut to its centre.

    Bilinear with antialiasing; uint8 is rounded and stays uint8.
    """
    height, width = size
    have_height, have_width = frames.shape[-2:]
    if (have_height, have_width) == (height, width):
        return frames
    # Of a very long picture only the middle is scaled: all of it could take more memory than there is.
    most_rows = max(1, LONGEST * height * have_width // width)
    most_columns = max(1, LONGEST * width * have_height // height)
    if have_height > most_rows or have_width > most_columns:
        top, left = max(0, have_height - most_rows) // 2, max(0, have_width - most_columns) // 2
        middle = frames[..., top : top + most_rows, left : left + most_columns]
        return resize_and_crop(middle, size)
    # In integers: a side that fits exactly must not become one pixel longer by rounding.
    if width * have_height >= height * have_width:
        scaled = (-(-have_height * width // have_width), width)
    else:
        scaled = (height, -(-have_width * height // have_height))
    top, left = (scaled[0] - height) // 2, (scaled[1] - width) // 2
    resized = resize(frames, scaled)
    return resized[..., top : top + height, left : left + width].contiguous()


def resize(frames: Tensor, size: tuple[int, int]) -> Tensor:
    """Frames [..., H, W] at ``size`` = (height, width): bilinear, antialiased; uint8 is rounded and stays uint8."""
    flat = frames.reshape(-1, 1, *frames.shape[-2:])
    pieces = []
    for piece in flat.split(16):  # a long clip in float32 at once would be several gigabytes
        scaled = F.interpolate(
            piece if piece.is_floating_point() else piece.float(), size=size, mode="bilinear", antialias=True
        )
        if not frames.is_floating_point():
            scaled = scaled.round_().clamp_(0, 255)
        pieces.append(scaled.to(frames.dtype))
    return torch.cat(pieces).reshape(*frames.shape[:-2], *size)


# ---- contact sheets --------------------------------------------------------------------------------------------------


def contact_sheet(clips: Iterable[Tensor], labels: Sequence[str], *, columns: int = 8, side: int = 128) -> Tensor:
    """One picture [3, H, W] with a labelled row per clip [3, F, H, W]: at most ``columns`` frames, evenly spread.

    Small frames are magnified to about ``side`` pixels in whole steps, so that their pixels stay sharp.
    """
    from PIL import Image, ImageDraw, ImageFont

    clips = list(clips)
    assert clips and len(clips) == len(labels), f"{len(clips)} clips, {len(labels)} labels"
    font = ImageFont.load_default(14)
    gap, text_height = 4, 20
    rows = [_tiles(clip, columns, side) for clip in clips]
    label_width = max(int(font.getlength(line)) for label in labels for line in label.split("\n")) + 2 * gap
    width = label_width + max(sum(tile.shape[1] + gap for _, tile in row) for row in rows)
    height = sum(text_height + row[0][1].shape[0] for row in rows) + gap
    sheet = Image.new("RGB", (width, height), (255, 255, 255))
    draw = ImageDraw.Draw(sheet)
    top = 0
    for label, row in zip(labels, rows):
        draw.multiline_text((gap, top + text_height), label, fill=(0, 0, 0), font=font)
        left = label_width
        for i, tile in row:
            draw.text((left, top + 2), f"frame {i}", fill=(110, 110, 110), font=font)
            sheet.paste(Image.fromarray(tile), (left, top + text_height))
            left += tile.shape[1] + gap
        top += text_height + row[0][1].shape[0]
    return torch.from_numpy(np.array(sheet)).permute(2, 0, 1).contiguous()


def _tiles(clip: Tensor, columns: int, side: int) -> list[tuple[int, np.ndarray]]:
    """(frame number, uint8 [H, W, 3]) of the frames that a row shows."""
    num_frames = clip.shape[1]
    chosen = sorted({round(i) for i in np.linspace(0, num_frames - 1, min(columns, num_frames))})
    frames = clip[:, chosen].cpu()
    longest = max(frames.shape[-2:])
    if longest > side * 1.5:
        scale = side / longest
        frames = resize(frames, (max(1, round(frames.shape[-2] * scale)), max(1, round(frames.shape[-1] * scale))))
    elif (times := round(side / longest)) > 1:
        frames = frames.repeat_interleave(times, -1).repeat_interleave(times, -2)
    return [(i, np.ascontiguousarray(tile)) for i, tile in zip(chosen, frames.permute(1, 2, 3, 0).numpy())]
