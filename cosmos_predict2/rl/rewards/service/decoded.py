# SPDX-License-Identifier: Apache-2.0
"""Decoded clips that the workers of one machine share: the first that needs one decodes it, the others read it."""

import fcntl
import hashlib
import logging
import time
from collections.abc import Callable
from pathlib import Path

import numpy
import torch
from torch import Tensor

log = logging.getLogger(__name__)

KEPT_S = 600.0
KEPT_BYTES = 4 << 30


class Decoded:
    """Files in ``folder``, named by a digest of the latents and of ``decoding``, how they are decoded."""

    def __init__(self, folder: Path, decoding: str) -> None:
        self.folder = folder
        self.decoding = decoding
        folder.mkdir(parents=True, exist_ok=True)

    def get(self, latent: Tensor, decode: Callable[[], Tensor]) -> Tensor:
        """uint8 pixels of a latent, which one worker at a time decodes; without the folder's help where that fails."""
        numbers = latent.contiguous().view(torch.uint8).numpy().tobytes()
        form = f"{self.decoding} {latent.dtype} {tuple(latent.shape)} ".encode()
        path = self.folder / f"{hashlib.blake2b(form + numbers, digest_size=16).hexdigest()}.npy"
        pixels: Tensor | None = None
        try:
            with path.open("a+b") as file:
                fcntl.flock(file, fcntl.LOCK_EX)  # the end of a process ends it, too
                file.seek(0)
                try:
                    return torch.from_numpy(numpy.load(file, allow_pickle=False))
                except (ValueError, EOFError):  # a new file, or one that was cut short
                    file.truncate(0)
                pixels = decode()
                numpy.save(file, pixels.numpy(), allow_pickle=False)
            self._purge()
        except OSError as error:  # a full disk, or a folder that is gone
            log.warning("decoded clips cannot be shared in %s: %s", self.folder, error)
        return decode() if pixels is None else pixels

    def _purge(self) -> None:
        """Remove what is old, and the oldest while there is too much."""
        files = []
        for path in self.folder.glob("*.npy"):
            try:
                facts = path.stat()
            except OSError:  # another worker has just removed it
                continue
            files.append((facts.st_mtime, facts.st_size, path))
        kept = 0
        for changed, size, path in sorted(files, reverse=True):
            kept += size
            if changed < time.time() - KEPT_S or kept > KEPT_BYTES:
                path.unlink(missing_ok=True)
