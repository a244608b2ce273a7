# The images of headrace, one target each:
#
#   gateway      the HTTP edge and the command line; no torch, no vLLM
#   engine-cpu   every stage, with vLLM for the CPU; also render and derender beside GPUs
#   engine-cuda  prefill and decode on NVIDIA GPUs
#
#   docker build --target gateway -t headrace-gateway .
#
# Another package index is a build argument (`--build-arg PIP_INDEX_URL`), taken from the builder's environment. It
# stays in the stages that install, so that no image and no history of one holds it.
ARG PYTHON_IMAGE=python:3.11-slim-bookworm

FROM ${PYTHON_IMAGE} AS base
ENV PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    PATH=/opt/headrace/bin:$PATH \
    HOME=/tmp \
    HEADRACE_HOME=/var/lib/headrace \
    HF_HOME=/var/cache/headrace/huggingface \
    VLLM_CACHE_ROOT=/var/cache/headrace/vllm \
    TRITON_CACHE_DIR=/var/cache/headrace/triton
# A volume takes owner and mode from the folder that it is first mounted on, so that nothing has to start as root.
RUN groupadd --gid 10001 headrace \
    && useradd --uid 10001 --gid headrace --no-create-home --home-dir /tmp --shell /usr/sbin/nologin headrace \
    && install -d -o headrace -g headrace -m 0755 /var/lib/headrace/models /var/cache/headrace /var/lib/nats \
    && install -d -o headrace -g headrace -m 0700 /run/headrace \
    && for name in own nats admin gateway render prefill decode derender batch; do \
         install -d -o headrace -g headrace -m 0700 "/run/headrace/$name"; done

# What changes rarely comes first: a change of headrace's own code installs none of it again.
FROM base AS pip
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ARG PIP_FIND_LINKS
ARG PIP_TRUSTED_HOST
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_PROGRESS_BAR=off PIP_ROOT_USER_ACTION=ignore
RUN python3 -m venv /opt/headrace
WORKDIR /src

FROM pip AS wheel
COPY pyproject.toml README.md LICENSE nats-server.conf headrace.example.toml ./
COPY shared shared
COPY services services
COPY client client
COPY cli cli
RUN pip wheel --no-deps --wheel-dir /wheels .

FROM pip AS gateway-packages
COPY requirements/gateway.lock requirements/
RUN pip install --no-deps --no-compile --require-hashes --only-binary :all: -r requirements/gateway.lock \
    && python -m compileall -q -j 0 /opt/headrace/lib

FROM base AS gateway
COPY --from=gateway-packages /opt/headrace /opt/headrace
COPY --from=wheel /wheels /tmp/wheels
RUN pip install --no-deps --no-index --no-cache-dir /tmp/wheels/*.whl \
    && python -m compileall -q -j 0 /opt/headrace/lib/python3*/site-packages/headrace && rm -r /tmp/wheels
USER 10001:10001
EXPOSE 8000
ENTRYPOINT ["headrace"]
CMD ["serve", "gateway"]

FROM pip AS cpu-packages
# PyPI's torch is the CUDA build. "" takes torch from where pip looks anyway.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN pip install --no-deps --no-compile ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} torch==2.13.0
COPY requirements/engine.lock requirements/
# Some packages carry templates that are no Python; compileall's status says so, and is not looked at.
RUN pip install --no-deps --no-compile --require-hashes --only-binary :all: -r requirements/engine.lock \
    && { python -m compileall -q -j 0 /opt/headrace/lib >/dev/null || true; }

FROM base AS engine-cpu
# vLLM's kernels for the CPU are linked against it.
RUN apt-get update && apt-get install -y --no-install-recommends libnuma1 && rm -rf /var/lib/apt/lists/*
COPY --from=cpu-packages /opt/headrace /opt/headrace
COPY --from=wheel /wheels /tmp/wheels
RUN pip install --no-deps --no-index --no-cache-dir /tmp/wheels/*.whl \
    && python -m compileall -q -j 0 /opt/headrace/lib/python3*/site-packages/headrace && rm -r /tmp/wheels
USER 10001:10001
ENTRYPOINT ["headrace"]

FROM pip AS cuda-packages
# The versions that the extra `cuda` of pyproject.toml names; NIXL as the CPU image has it, for it is part of the contract.
RUN pip install --no-compile "vllm==0.32.0" "nixl[cu13]==1.5.1"
COPY requirements/gateway.lock requirements/
RUN sed -E 's/ *\\$//; /^ *--hash/d' requirements/gateway.lock > requirements/constraints.txt \
    && pip install --no-compile -r requirements/constraints.txt \
    && { python -m compileall -q -j 0 /opt/headrace/lib >/dev/null || true; }

FROM base AS engine-cuda
# Triton compiles the launchers of its kernels on the machine that runs them.
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
COPY --from=cuda-packages /opt/headrace /opt/headrace
COPY --from=wheel /wheels /tmp/wheels
RUN pip install --no-deps --no-index --no-cache-dir /tmp/wheels/*.whl \
    && python -m compileall -q -j 0 /opt/headrace/lib/python3*/site-packages/headrace && rm -r /tmp/wheels
USER 10001:10001
ENTRYPOINT ["headrace"]
