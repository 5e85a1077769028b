# mla_portable on an engine's own image; docs/install.md lists images. ci/install runs the same step in a fresh environment.
ARG IMAGE=vllm/vllm-openai:v0.26.0
FROM ${IMAGE}
COPY . /opt/mla_portable
WORKDIR /opt/mla_portable
RUN pip install -r requirements-no-torch.txt && pip install --no-deps -e . -e backends/triton -e backends/nvidia -e backends/iluvatar
