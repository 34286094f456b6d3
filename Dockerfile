# SPDX-License-Identifier: Apache-2.0
# A GPU box. Written to the same pins as the tests, but not built by them: no Docker and no GPU there.
#   docker build -t cosmos-posttrain .
#   docker run --gpus all --ipc=host -v $PWD/checkpoints:/workspace/checkpoints -v $PWD/datasets:/workspace/datasets -it cosmos-posttrain
# The base brings the driver's user side and a compiler (torch.compile needs one); torch comes with its own CUDA libraries.
FROM nvidia/cuda:13.0.1-devel-ubuntu24.04

ENV DEBIAN_FRONTEND=noninteractive PIP_NO_CACHE_DIR=1 PYTHONUNBUFFERED=1
RUN apt-get update \
    && apt-get install -y --no-install-recommends build-essential git python3 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*

RUN python3 -m venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH

WORKDIR /workspace
# The dependencies first, so that a change of the code does not install torch again.
COPY setup.py pyproject.toml constraints.txt ./
RUN mkdir imaginaire cosmos_predict2 scripts \
    && pip install -c constraints.txt setuptools wheel \
    && pip install -c constraints.txt --no-build-isolation -e '.[gpu,track,s3]'

COPY . .
RUN pip install -c constraints.txt --no-build-isolation --no-deps -e .

# Faster attention and optimizer kernels are optional and build from source for minutes:
#   pip install --no-build-isolation -e '.[flash,te]'
CMD ["bash"]
