# SPDX-License-Identifier: Apache-2.0
"""Additions in a folder outside the tree work in every program; the files are those of extending{,_rl}.md."""

import json
import re
import shlex
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.programs import finished, warm_python
from tests.test_documentation import ROOT, blocks

PAGES = [ROOT / "documentations" / name for name in ("extending.md", "extending_rl.md")]
RUNS = "checkpoints/posttraining"
POLICY = f"{RUNS}/reinforcement_learning/my_policy"
FRESH_NOISE = ROOT / "documentations/rl_options.md"
PROGRAM = """
import runpy, sys

def run(program, *words):
    sys.argv = [program, *words]
    try:
        program.endswith(".py") and runpy.run_path(program, run_name="__main__")
        program.endswith(".py") or runpy.run_module(program, run_name="__main__")
    except SystemExit as exit:
        assert not exit.code, (program, exit.code)

"""
ENCODER = """
from cosmos_predict2.text.bytes_encoder import BytesEncoder
from imaginaire.buildable import buildable

@buildable("encoder", "mine")
class Mine(BytesEncoder):
    def __init__(self, num_tokens=8, width=4):
        super().__init__(num_tokens, width)
        self.name = f"mine-v1-{num_tokens}x{width}"
"""
SHORT_RL = (
    "trainer.max_iter=1 checkpoint.save_iter=1 scheduler.warm_up_steps=[0] scheduler.cycle_lengths=[8]"
    " trainer.run_validation=false trainer.callbacks.draw_samples=null trainer.callbacks.quality_alarm=null"
    " dataloader_train.batch_size=2 dataloader_train.dataset.num_episodes=8 model.config.rl.num_rollout=2"
    " model.config.rl.rollout_batch=2 model.config.rl.sample_steps=3 model.config.rl.train_on=[0]"
    " trainer.grad_accum_iter=2 trainer.logging_iter=1"
)
SHORT_POLICY = (
    "trainer.max_iter=1 checkpoint.save_iter=1 trainer.run_validation=false trainer.logging_iter=1"
    " dataloader_train.batch_size=2 model.config.rl.group_size=2 model.config.rl.updates=1"
    " model.config.rl.minibatches=1"
)
SHORT = {  # what the commands of the page get besides
    "job.name=my_callback": "trainer.max_iter=5 trainer.run_validation=false trainer.callbacks.draw_samples=null",
    "experiment=my_project": "trainer.max_iter=1 trainer.run_validation=false trainer.callbacks.draw_samples=null",
    "job.name=brighter": SHORT_RL,
    "scripts.collect": "--episodes 4",
    "--policy my_policy": "--steps 5",
    "experiment=my_policy": SHORT_POLICY,
    "--suite my_robot": "--episodes 2 --out outputs/evaluation",
    "--solver ancestral": "--num_steps 2",
}


def commands() -> Iterable[list[str]]:
    """The commands of the pages that need their files, without ``python -m``, and made short."""
    for language, block in (each for page in PAGES for each in blocks(page)):
        if language == "bash" and block.startswith("# needs the files of this section"):
            text = block.replace("\\\n", "").replace("$CHECKOUT", str(ROOT)).replace("$run", POLICY)
            for line in re.findall(r"^python (?:-m )?(.*)", text, re.MULTILINE):
                yield [*shlex.split(line), *next((more.split() for key, more in SHORT.items() if key in line), [])]


def play(folder: Path, programs: Iterable[list[str]]) -> None:
    code = PROGRAM + "".join(f"run(*{words})\n" for words in programs)
    done = finished(warm_python(), "-c", code, cwd=folder)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]


@pytest.mark.slow
def test_what_is_added_is_trained_and_read_again_by_every_program(tmp_path: Path) -> None:
    """Two processes: what the first has trained the second knows by ``--import`` alone."""
    for _, block in (each for page in PAGES for each in blocks(page)):
        if found := re.match(r"# needs its place: (my_project/\w+\.py)\n", block):
            (tmp_path / found[1]).parent.mkdir(exist_ok=True)
            (tmp_path / found[1]).write_text(block)
    (tmp_path / "my_project/encoder.py").write_text(ENCODER)
    trains = ("scripts.train", "scripts.train_policy", "scripts.collect")
    of_page = list(commands())
    play(tmp_path, [words for words in of_page if words[0] in trains])
    assert "train/largest_weight" in next(tmp_path.rglob("my_callback/metrics.jsonl")).read_text()
    own = ["--import", "my_project"]
    more = [["scripts.plan", *own, "--config", f"{POLICY}/config.yaml"], ["scripts.run_report", *own, POLICY]]
    more += [["scripts.encode_prompts", "--import", "my_project.encoder", "--text_encoder", "mine"]]
    more[-1] += ["--prompt", "push", "--out", "outputs/text.safetensors"]
    play(tmp_path, [*(words for words in of_page if words[0] not in trains), *more])
    made = ("exported/policy.safetensors", "mine.safetensors", "text.safetensors")
    for file in ("output/generated_video.mp4", *(f"outputs/{name}" for name in made)):
        assert (tmp_path / file).is_file(), file
    figures = json.loads((tmp_path / "outputs/evaluation/evaluation.json").read_text())
    assert figures["suite"] == "my_robot"


@pytest.mark.slow
def test_a_flow_of_ones_own_learns_at_fresh_noise(tmp_path: Path) -> None:
    (flow,) = (block for _, block in blocks(FRESH_NOISE) if block.startswith("# needs its place: my_flow.py"))
    (tmp_path / "my_flow.py").write_text(flow)
    (chosen,) = re.findall("`(experiment=tiny_vla_grpo_simulator .*MyFlow})`", FRESH_NOISE.read_text())
    options = f"{chosen} job.name=my_flow model.config.rl.objective=nft {SHORT_POLICY}"
    play(tmp_path, [["scripts.train", "--", *options.split()]])
    assert "train/good_share" in next(tmp_path.rglob("my_flow/metrics.jsonl")).read_text()
