# SPDX-License-Identifier: Apache-2.0
"""Captions per second of get_t5_embeddings: every caption another, captions that recur, and with the caption cache.

    python -m benchmarks.text_embeddings [--t5 DIR] [--device cuda] [--threads N]

Without --t5 the encoder is a random T5 of the released width, 1024, with four layers and four heads: far smaller
than T5-11B, so what does not depend on the encoder shows. Each figure is the best of three runs into new folders; files
and their record are written as the script writes them.
"""

import tempfile
from pathlib import Path

import torch

from benchmarks import machine
from cosmos_predict2.interfaces import TextEncoder
from cosmos_predict2.text.bytes_encoder import BytesEncoder
from cosmos_predict2.text.embeddings.encode import embed_captions
from cosmos_predict2.text.embeddings.folder import EmbeddingFolder
from cosmos_predict2.text.t5 import T5Encoder

TEXT = "the robot arm slowly moves a red cup to the left of the table and puts it down beside the blue box"
CLIPS, DISTINCT = 200, 20  # and different captions, where they recur


def main() -> None:
    parser = machine.parser(__doc__, "threads", "device")
    parser.add_argument("--t5", metavar="DIR", help="a T5 folder, such as checkpoints/google-t5/t5-11b")
    args = machine.parse(parser)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        t5 = T5Encoder(args.t5 or small_t5(folder / "t5"), device=args.device, batch_size=8)
        print(f"{CLIPS} clips, {DISTINCT} that recur, {torch.get_num_threads()} threads on {args.device}")
        encoders: dict[str, TextEncoder] = {"t5": t5, "bytes": BytesEncoder(512, 1024)}
        for kind, encoder in encoders.items():
            turns = [rates(folder / f"{kind}-{i}", encoder) for i in range(3)]
            for key in turns[0]:
                print(f"{kind}, {key}: {max(turn[key] for turn in turns):.0f} clips/s", flush=True)


def rates(place: Path, encoder: TextEncoder) -> dict[str, float]:
    """Clips per second of everything, in new folders below ``place``."""
    cache, different, recurring = place / "cache", captions(CLIPS), captions(DISTINCT)
    return {
        "captions that recur": rate(place / "recurring", recurring, encoder),
        "every caption another, no cache": rate(place / "different", different, encoder),
        "every caption another, cache empty": rate(place / "filling", different, encoder, cache),
        "every caption another, cache full": rate(place / "full", different, encoder, cache),
        "reading": read_rate(place / "different"),
    }


def captions(distinct: int) -> dict[str, str]:
    """A caption of 20 to 40 words for each clip; so many of them differ."""
    texts = [f"{TEXT} number {i}{TEXT[: i % 80]}" for i in range(distinct)]
    return {f"clip_{i:06d}": texts[i % distinct] for i in range(CLIPS)}


def rate(folder: Path, texts: dict[str, str], encoder: TextEncoder, cache: Path | None = None) -> float:
    seconds, counts = machine.timed(lambda: embed_captions(folder, texts, encoder, cache=cache))
    assert counts.written == len(texts)
    return len(texts) / seconds


def read_rate(folder: Path) -> float:
    embeddings, stems = EmbeddingFolder(folder), list(captions(CLIPS))
    return len(stems) / machine.seconds(lambda: [embeddings.read(stem) for stem in stems])


def small_t5(folder: Path) -> str:
    """A random T5 of width 1024 in the public layout."""
    import sentencepiece
    from transformers import T5Config, T5EncoderModel

    folder.mkdir(parents=True)
    torch.manual_seed(0)
    T5EncoderModel(
        T5Config(vocab_size=200, d_model=1024, d_kv=64, d_ff=1024, num_layers=4, num_heads=4)
    ).save_pretrained(folder)
    with open(folder / "spiece.model", "wb") as file:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter([TEXT] * 20), model_writer=file, vocab_size=60, hard_vocab_limit=False,
            pad_id=0, eos_id=1, unk_id=2, bos_id=-1, minloglevel=2,
        )  # fmt: skip
    return str(folder)


if __name__ == "__main__":
    main()
