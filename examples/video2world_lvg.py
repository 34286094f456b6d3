# SPDX-License-Identifier: Apache-2.0
"""A long video, chunk by chunk: each begins with the last frames of the one before, as they were decoded.

It has 93 + (chunks - 1) (93 - k) frames, k of ``--num_conditional_frames``. The noise of chunk c has the seed + c.
"""

import argparse
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that the file runs from a checkout as it is

from examples import video2world
from examples.video2world import Jobs, Program
from imaginaire.command_line import at_least


def add_flags(add: Callable[..., Any]) -> None:
    add("--num_chunks", type=at_least(1, 1000), default=6, metavar="N", help="chunks of the length of the model")


def in_chunks(args: argparse.Namespace, choice: Any, jobs: Jobs) -> Jobs:
    from cosmos_predict2.tokenizers.sizes import pixel_frames

    requests, settings = jobs
    chunk = pixel_frames(choice.config.state_t)
    forms = []
    for request in requests:
        given = request.num_conditional_frames
        form = replace(request.form, num_frames=chunk + (args.num_chunks - 1) * (chunk - given))
        form.num_chunks(chunk, given)  # raises where it cannot be made
        forms.append(form)
    return [replace(request, form=form) for request, form in zip(requests, forms)], settings


main = partial(
    video2world.main,
    program=Program("Make a long video, chunk by chunk, from a picture or a clip.", add_flags, plan=in_chunks),
)

if __name__ == "__main__":
    sys.exit(main())
