# mla_portable on an engine's own image; docs/install.md lists images. ci/install runs the same step in a fresh environment.
ARG IMAGE=vllm/vllm-openai:v0.26.0
FROM ${IMAGE}
# For the build alone: pip keeps no downloads, and may install beside a Python that belongs to the distribution (PEP 668).
ARG PIP_NO_CACHE_DIR=1
ARG PIP_BREAK_SYSTEM_PACKAGES=1
COPY . /opt/mla_portable
# `cd`, not WORKDIR: the engine goes on starting in the folder that its image names.
RUN cd /opt/mla_portable && pip install -r requirements-no-torch.txt && pip install --no-deps -e . -e backends/common -e backends/triton -e backends/nvidia -e backends/iluvatar -e backends/amd -e backends/ascend
