# SPDX-License-Identifier: Apache-2.0
"""Packaging of cosmos-posttrain: a small core; everything that a machine may lack is an extra.

Its name and the Python that it needs are in pyproject.toml. The distribution is not called cosmos-predict2: that name
on the package index belongs to somebody else.
"""

from pathlib import Path

from setuptools import find_packages, setup

CORE = [
    "torch>=2.6",
    "numpy>=1.26",
    "attrs>=23.1",
    "hydra-core>=1.3,<1.4",
    "omegaconf>=2.3,<2.4",
    "fsspec>=2023.5",
    "safetensors>=0.4.3",
    "einops>=0.7",
    "tqdm>=4.64",
    "psutil>=5.9",
    "PyYAML>=6.0",
    "av>=12.0",
    "pillow>=10.0",
]

EXTRAS = {
    # What a GPU box adds. NVIDIA apex (the fused optimizer) is used where it is found, but only its source builds
    # (https://github.com/NVIDIA/apex): "apex" on the package index is an unrelated project.
    "gpu": ["nvidia-ml-py>=12.535"],
    # Both build against the installed torch: pip install --no-build-isolation -e '.[flash]'
    "flash": ["flash-attn>=2.7"],
    "te": ["transformer-engine[pytorch]>=2.2"],
    # For samplers and experiment files that import megatron.core.parallel_state.
    "compat": ["megatron-core>=0.10"],
    "s3": ["s3fs>=2023.5"],
    # Released weights: the download command, hub ids as paths, and the text encoders (T5, Reason1).
    "weights": ["huggingface_hub>=0.24", "transformers>=4.52", "sentencepiece>=0.2"],
    # Robot data in tables: LIBERO's HDF5 files, LeRobot's parquet files.
    "data": ["h5py>=3.8", "pyarrow>=14.0"],
    "track": ["wandb>=0.17", "tensorboard>=2.15"],
    # The reward service (its clients need the core only), with Redis for several machines.
    "reward": ["fastapi>=0.110", "uvicorn>=0.29", "redis>=5.0", "tomli>=2.0; python_version < '3.11'"],
    # A page on which a robot is driven in a world model's imagination (scripts.drive).
    "drive": ["fastapi>=0.110", "uvicorn>=0.29", "websockets>=12.0"],
    # Policies and world models as servers, and others' (scripts.serve_policy, openpi:// and gr00t://; wfm://).
    "serve": ["msgpack>=1.0.5", "websockets>=15.0", "pyzmq>=25.1"],
    # Recipes of cosmos-rl, and rollouts on several machines (without [default]: nothing here shows Ray's dashboard).
    "rl": ["ray>=2.40", "tomli>=2.0; python_version < '3.11'"],
    # Any registered environment as a simulator (--suite gym:ID); these packages bring some.
    "gym": ["gymnasium>=1.0"],
    "metaworld": ["gymnasium>=1.1", "metaworld>=3.0"],
    "gym-pusht": ["gymnasium>=1.0", "gym-pusht>=0.1.8"],
    # Robot policies and their simulators. LIBERO itself comes after them, by pip install --no-deps hf-libero==0.1.4:
    # what it asks for besides (robomimic) brings another torch, and is used in training alone.
    "vla": [
        "robosuite==1.4.0",
        "mujoco>=3.0,<3.9",
        "bddl==1.0.1",
        "gymnasium>=0.29",
        "easydict>=1.9",
        "cloudpickle>=2.0",
        "future>=0.18.2",
        "termcolor>=2.0",
        "opencv-python-headless>=4.6",
        "matplotlib>=3.5.3",
    ],
}
EXTRAS["vla"] += EXTRAS["weights"]  # which the policies are built of

DEVELOPMENT = [
    "pytest>=8.2",
    "pytest-xdist>=3.6",
    "ruff>=0.6",
    "mypy>=1.11",
    "types-psutil",
    "types-PyYAML",
    "types-tqdm",
    "moto[s3]>=5.0",  # with flask it is a server of S3; its own [server] brings CloudFormation, GraphQL and more
    "flask>=2.2.2",
    "flask-cors>=3.0",
    "boto3>=1.34",
    "matplotlib>=3.8",
    "diffusers>=0.36",  # the peer that tests and benchmarks compare with
    "peft>=0.14",  # reads the adapters that we export, in tests
    "httpx>=0.27",  # requests to the reward service, in tests
    "hypothesis>=6.100",  # makes malformed ones
]

EXTRAS["dev"] = [
    *DEVELOPMENT,
    *(
        each
        for name in ("s3", "track", "weights", "data", "compat", "reward", "drive", "serve", "rl", "gym")
        for each in EXTRAS[name]
    ),
]
EXTRAS["all"] = sorted({requirement for extra in EXTRAS.values() for requirement in extra})

setup(
    version="0.3.0",
    description="Post-training for video world models",
    long_description=Path("README.md").read_text(encoding="utf-8") if Path("README.md").exists() else "",
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    packages=find_packages(
        include=["imaginaire", "imaginaire.*", "cosmos_predict2", "cosmos_predict2.*", "scripts", "scripts.*"]
    ),
    package_data={
        "cosmos_predict2.guardrail": ["*.txt"],
        "cosmos_predict2.checkpoints": ["*.safetensors", "README.md", "tiny_action/*"],
        "cosmos_predict2.tokenizers": ["*.safetensors"],
        "cosmos_predict2.tools.drive": ["*.html"],
    },
    entry_points={"console_scripts": ["cosmos-rl = scripts.cosmos_rl:main"]},
    install_requires=CORE,
    extras_require=EXTRAS,
)
