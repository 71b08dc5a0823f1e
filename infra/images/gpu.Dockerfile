# The image of flow runs and Ray nodes with GPUs. Build it from the repository's root:
#   docker build -f infra/images/gpu.Dockerfile -t policyflow:0.1.0-gpu .
# The digest is the index's of all platforms.
ARG BASE=docker.io/nvidia/cuda:13.0.1-cudnn-devel-ubuntu24.04@sha256:8b2705ea7a8653ad3451b46ab835eced92d77b44e671b9cf3ad4f95fbb2efe5e
FROM ${BASE}
ENV DEBIAN_FRONTEND=noninteractive PYTHONUNBUFFERED=1 DO_NOT_TRACK=1 RAY_USAGE_STATS_ENABLED=0 \
    PREFECT_SERVER_ANALYTICS_ENABLED=false POLICYFLOW_HOME=/data PREFECT_HOME=/tmp/prefect HF_HUB_OFFLINE=1 PATH=/opt/venv/bin:$PATH
RUN apt-get update \
    && apt-get install -y --no-install-recommends python3.12 python3.12-dev python3.12-venv build-essential git ca-certificates \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /opt/policyflow
# The lock first: the environment is its own layer, and a change of the code does not install it again. It is compiled
# here: the user that runs it cannot write to /opt, so that every process would compile torch and vLLM anew.
# Transformer Engine is compiled against the lock's own torch (20 minutes of one core).
COPY requirements/uv.txt requirements/build.txt requirements/gpu.txt requirements/built.txt requirements/built.sh requirements/
RUN python3.12 -m venv /opt/venv /opt/uv && /opt/uv/bin/pip install --no-cache-dir --require-hashes -r requirements/uv.txt \
    && /opt/uv/bin/uv pip sync --no-cache --compile-bytecode --python /opt/venv --require-hashes --build-constraints requirements/build.txt requirements/gpu.txt \
    && UV_NO_CACHE=1 requirements/built.sh /opt/uv/bin/uv /opt/venv
COPY pyproject.toml README.md prefect.yaml ./
COPY flows flows
COPY tasks tasks
COPY environments environments
COPY infra infra
# Ubuntu's image has a user of uid 1000 already.
RUN /opt/uv/bin/uv pip install --no-cache --python /opt/venv --no-deps --editable . \
    && /opt/venv/bin/python -m compileall -q flows tasks environments infra \
    && install -d -o 1000 /data
USER 1000
