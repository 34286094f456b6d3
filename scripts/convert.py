# SPDX-License-Identifier: Apache-2.0
"""Turn a checkpoint into another form, and compare the two.

The two training layouts become each other. A network's weights become a released .pt, a safetensors file, a folder of
diffusers, of Wan2.1's repository or of DCP, its LoRA adapters files of PEFT, diffusers, ComfyUI or kohya's programs. A
trained policy takes its published layout.
"""

import argparse
import logging
import shutil
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch

from cosmos_predict2.checkpoints.dit_weights import inside_a_pipeline, is_adapter, open_weights
from cosmos_predict2.checkpoints.export import FORMS, Export, export, written_file
from cosmos_predict2.checkpoints.export_adapters import ADAPTER_FORMS, export_adapter
from cosmos_predict2.checkpoints.folders import FOLDER_FORMS, plan_folder, verify_parts, write_parts
from cosmos_predict2.checkpoints.publishing import Push, write_card
from cosmos_predict2.checkpoints.verify import verify_adapter, verify_network, verify_set
from imaginaire import command_line, storage
from imaginaire.checkpoint import layout as checkpoint_layout
from imaginaire.checkpoint.layout import KINDS, CheckpointSet
from imaginaire.errors import CheckpointError, ConfigError, near

log = logging.getLogger(__name__)

_EPILOG = """\
What is read and what is written are two words, SOURCE DESTINATION with --to FORM, or --from SOURCE --to DESTINATION.
Where no form is given, the suffix of the destination decides, and a policy becomes --to public.

--to standard, dcp: the whole training state. SOURCE is a run's folder, its checkpoints folder, or one iteration in it
(checkpoints/model/iter_000000500.pt or checkpoints/iter_000000500). DESTINATION is the folder of a run that resumes.

--to pt, safetensors, diffusers, original, dcp-weights: the weights of one network, of Cosmos, of Wan2.1 or of their
tokenizer. SOURCE is anything that holds them: a released or training .pt, a run's folder, a DCP folder, safetensors, a
folder of diffusers or Wan2.1, a hub id. DESTINATION is the file, or the folder, to write. Names in files begin with
"net.", as released ones do; those of a tokenizer, and in --to original (Wan2.1 alone), do not.

--to peft, diffusers-lora, comfyui, kohya: LoRA adapters alone. SOURCE is a checkpoint of a run with adapters, or an
adapter in another layout. DESTINATION is the folder to write, of the last two the .safetensors file. Each can be given
to --lora of the inference program; the adapters of a policy (--to peft) to model.config.policy.lora_path.

--to diffusers-pipeline, released: whole folders with tokenizer and text encoder, which are looked for beside SOURCE, in
its card and below checkpoints/. --dtype is that of the network. --from SOURCE --to FOLDER writes diffusers' pipeline,
of adapters diffusers-lora.

--to public: a policy that has a published layout (OpenVLA, PI0.5) as its folder; adapters are added to the weights.
Another is written as scripts.train_policy does. SOURCE is a run or a folder. --from RUN --to FOLDER writes the same.

examples:
  python -m scripts.convert checkpoints/examples/minimal/minimal checkpoints/examples/minimal/as_dcp --to dcp
  python -m scripts.convert RUN/checkpoints/model/iter_000001000.pt exported.pt --weights ema --dtype bfloat16
  python -m scripts.convert exported.pt exported/transformer --to diffusers --verify
  python -m scripts.convert RUN adapter --to peft --weights ema
  python -m scripts.convert --from RUN --to public_layout/
  python -m scripts.convert --from checkpoints/nvidia/Cosmos-Predict2-2B-Video2World/model-720p-16fps.pt --to pipeline/
"""
PUBLIC = "public"
_TRAINING = ("standard", "dcp", "dcp-weights")  # read by this code alone
KNOWN = ("standard", "dcp", *FORMS, *FOLDER_FORMS, *ADAPTER_FORMS, PUBLIC)
_OF_FOLDERS = ("tokenizer_path", "text_encoder_path", "no_text_encoder")
_WHICH = {"auto": "auto", "net": "net", "ema": "net_ema"}
_DTYPES = {"bfloat16": torch.bfloat16, "bf16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_DTYPES |= {"fp16": torch.float16, "fp32": torch.float32}


def convert(source: str, destination: str, to: str, *, verifies: bool = False) -> CheckpointSet:
    """Read a set and write it in the other layout; the written set. One that exists is an error, or only verified."""
    found = checkpoint_layout.find_set(source)
    checkpoint_layout.require_unchanged(found, KINDS)
    folder = storage.join(destination, "checkpoints")
    written = CheckpointSet(folder, checkpoint_layout.set_name(found.iteration, dcp=to == "dcp"))
    exists = any(written.has(kind) for kind in KINDS)
    if exists and not verifies:
        raise CheckpointError(f"{folder} already has {written.name}. Choose another destination.")
    if not exists:
        log.info("reading iteration %d (%.3g MB) from %s", found.iteration, found.bytes() / 1e6, found.folder)
        trees = {kind: found.read(kind) for kind in KINDS}
        write = checkpoint_layout.write_dcp if to == "dcp" else checkpoint_layout.write_standard
        write(written, trees)
        checkpoint_layout.write_pointer(written)
        log.info("wrote %s in %s", written.name, written.folder)
    if verifies:
        verify_set(found, written)
    return written


parser = command_line.parser("scripts.convert", __doc__, _EPILOG)
add = parser.add_argument
add("source", nargs="?", metavar="SOURCE", help="what to read (a path, s3:// address or hub id)")
add("destination", nargs="?", metavar="DESTINATION", help="what to write: a run's folder, a file or another folder")
add("--from", dest="from_", metavar="SOURCE", help="what to read, in place of the first word; then --to is a path")
add("--to", metavar="FORM", help=f"form to write: {', '.join(KNOWN)}; beside --from the DESTINATION")
add("--weights", choices=tuple(_WHICH), default="auto", help="trained or averaged weights (auto: trained, if there)")
add("--dtype", choices=tuple(_DTYPES), help="cast to this (default: as they are)")
add("--merge-lora", "--merge_lora", action="store_true", help="add LoRA adapters to their weights")
add("--lora_alpha", type=command_line.above_zero, metavar="NUMBER", help="alpha of adapters that record none")
rope_scale = "RoPE ratios of a size that was not released"
add("--rope_scale", type=command_line.above_zero, nargs=3, metavar=("T", "H", "W"), help=rope_scale)
add("--tokenizer_path", default="", metavar="PATH", help="the tokenizer of a whole folder, where it is elsewhere")
add("--text_encoder_path", default="", metavar="FOLDER", help="the text encoder of a whole folder, the same")
add("--no_text_encoder", action="store_true", help="a whole folder without its text encoder")
add("--overwrite", action="store_true", help="replace a file or folder that exists")
add("--verify", action="store_true", help="compare names, values, outputs; what exists is compared, not written")
add("--push", metavar="ORG/NAME", help="then send what was written, with its card, to this repository of the hub")
add("--public", action="store_true", help="with --push: a repository that all may read, where it is a new one")
add("--dry_run", action="store_true", help="with --push: log what would be sent, and send nothing")


def run(args: argparse.Namespace) -> None:
    """Convert, write a card beside weights, and send both where that is asked for."""
    args.source, args.destination, form = _source_and_destination(args)
    form = form or _form_of(args.source, args.destination, is_folder=args.from_ is not None)
    push = Push(args.push or "", args.dry_run, args.public)
    if args.push is None and (args.dry_run or args.public):
        raise ConfigError("--dry_run and --public go with --push ORG/NAME.")
    if args.push is not None:
        if form in _TRAINING:
            raise ConfigError(f"--push sends weights that others read, which --to {form} does not write.")
        push.check(args.destination)
    if _run(args, form) and form not in _TRAINING:
        write_card(args.destination, args.source)
    if args.push is not None:
        push.send(args.destination, args.source)


def _run(args: argparse.Namespace, form: str) -> bool:
    """True if something was written, and not only compared."""
    if form in ("standard", "dcp", PUBLIC):
        of_weights = {
            "--weights": args.weights != "auto" and form != PUBLIC,
            "--dtype": args.dtype,
            "--merge-lora": args.merge_lora,
            "--lora_alpha": args.lora_alpha is not None,
            "--rope_scale": args.rope_scale,
            "--verify": args.verify and form == PUBLIC,
            **{f"--{flag}": getattr(args, flag) for flag in _OF_FOLDERS},
        }
        if given := [flag for flag, is_given in of_weights.items() if is_given]:
            kept = "its network as it is" if form == PUBLIC else "the whole training state"
            raise ConfigError(f"--to {form} keeps {kept}, so {', '.join(given)} cannot be applied.")
        if form == PUBLIC:
            _to_public(args)
        else:
            convert(args.source, args.destination, form, verifies=args.verify)
        return True
    options: dict[str, Any] = dict(
        which=_WHICH[args.weights],
        dtype=_DTYPES[args.dtype] if args.dtype else None,
        lora_alpha=args.lora_alpha,
        overwrite=args.overwrite,
    )
    if form in ADAPTER_FORMS:
        if args.merge_lora or args.rope_scale:
            raise ConfigError(f"--to {form} writes adapters alone: --merge-lora and --rope_scale do not go with it.")
        from cosmos_predict2.rl.policies.files import policy_adapter

        adapter = policy_adapter(args.source, _WHICH[args.weights], args.lora_alpha)
        job = Export(args.source, args.destination, form, **options)
        write, verify = partial(export_adapter, job, adapter), partial(verify_adapter, job, adapter)
    else:
        options |= dict(merge_lora=args.merge_lora, rope_scale=tuple(args.rope_scale) if args.rope_scale else None)
        job = Export(args.source, args.destination, form, **options)
        write, verify = partial(export, job), partial(verify_network, job)
    if form in FOLDER_FORMS:
        text = None if args.no_text_encoder else args.text_encoder_path
        folder = plan_folder(job, tokenizer=args.tokenizer_path, text_encoder=text)
        write, verify, job = partial(write_parts, folder), partial(verify_parts, folder), folder.networks[0]
    elif others := [flag for flag in _OF_FOLDERS if getattr(args, flag)]:
        raise ConfigError(
            f"--{others[0]} is for whole folders (--to {' or '.join(FOLDER_FORMS)}), not for --to {form}."
        )
    is_written = not (args.verify and not args.overwrite and storage.exists(written_file(job)))
    if is_written:
        tensors = write()
        log.info("wrote %s (%d tensors%s)", args.destination, len(tensors), f", {args.dtype}" if args.dtype else "")
    else:
        log.info("%s exists: it is compared, not written", args.destination)
    if args.verify:
        verify()
    return is_written


def _source_and_destination(args: argparse.Namespace) -> tuple[str, str, str | None]:
    """(Source, destination, form or None) of the command line."""
    words, to = [word for word in (args.source, args.destination) if word is not None], args.to
    if args.from_ is None:
        if len(words) < 2:
            raise ConfigError("Give both SOURCE and DESTINATION, or --from SOURCE --to DESTINATION.")
        if to is not None and to not in KNOWN:
            raise ConfigError(f"--to {to}: no form is called so.{near(to, KNOWN)} A destination is the second word.")
        return words[0], words[1], to
    if words:
        raise ConfigError(f"--from {args.from_} and {' '.join(words)}: give --from SOURCE --to DESTINATION alone.")
    if to is None:
        raise ConfigError(f"--from {args.from_} needs --to DESTINATION.")
    if to in KNOWN:
        cure = f"Give {args.from_} DESTINATION --to {to}, or --to ./{to} for a folder of this name."
        raise ConfigError(f"--from {args.from_} --to {to}: beside --from, --to is what to write. {cure}")
    return args.from_, to, None


def _to_public(args: argparse.Namespace) -> None:
    """Write a policy as the folder that it was published as; one without a published layout as training does."""
    from cosmos_predict2.rl.policies.files import is_public, read_policy, write_policy

    folder, part = Path(args.destination), Path(args.destination.rstrip("/") + ".part")
    if storage.is_remote(args.destination):
        raise ConfigError(f"{args.destination}: a policy is written to a folder of this machine. Upload it from there.")
    if folder.is_file() or (folder.exists() and not args.overwrite):
        raise ConfigError(f"{args.destination} exists: give another folder, or --overwrite.")
    policy, card = read_policy(args.source, _WHICH[args.weights])
    about = {**card.about, "converted_from": args.source}
    if not is_public(type(policy)):
        log.info("wrote %s", write_policy(folder, policy, about))
        return
    shutil.rmtree(part, ignore_errors=True)
    write_policy(part, policy, about)
    if folder.is_dir():  # of which no file may be left among the new ones
        shutil.rmtree(folder)
    part.replace(folder)
    log.info("wrote %s", args.destination)


def _form_of(source: str, destination: str, *, is_folder: bool) -> str:
    """The form by the suffix of the destination; in a folder a policy becomes public, the others diffusers'."""
    from cosmos_predict2.rl.policies.files import holds_policy

    suffixes = {".pt": "pt", ".pth": "pt", ".safetensors": "safetensors"}
    found = next((form for suffix, form in suffixes.items() if destination.endswith(suffix)), None)
    if found is not None:
        return found
    if holds_policy(inside_a_pipeline(source)):
        return PUBLIC
    if is_folder:
        return "diffusers-lora" if is_adapter(open_weights(source)) else FOLDER_FORMS[0]
    forms = f"choose another name, or give SOURCE DESTINATION --to FORM: {', '.join(KNOWN)}"
    raise ConfigError(f"{destination} does not end in .pt or .safetensors, and {source} is no policy: {forms}.")


if __name__ == "__main__":
    sys.exit(command_line.main(parser, run))
