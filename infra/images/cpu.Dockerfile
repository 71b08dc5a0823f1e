# The image of flow runs without a GPU: prepare, the tests' sizes, and flows whose engines are on a Ray cluster.
#   docker build -f infra/images/cpu.Dockerfile -t policyflow:0.1.0-cpu .
# The digest is the index's of all platforms.
ARG BASE=docker.io/library/python:3.12.11-slim-bookworm@sha256:519591d6871b7bc437060736b9f7456b8731f1499a57e22e6c285135ae657bf7
FROM ${BASE}
ENV PYTHONUNBUFFERED=1 DO_NOT_TRACK=1 RAY_USAGE_STATS_ENABLED=0 \
    PREFECT_SERVER_ANALYTICS_ENABLED=false POLICYFLOW_HOME=/data PREFECT_HOME=/tmp/prefect HF_HUB_OFFLINE=1 \
    PATH=/opt/venv/bin:$PATH
RUN apt-get update \
    && apt-get install -y --no-install-recommends build-essential git libnuma1 \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /opt/policyflow
# The lock first: the environment is its own layer, and a change of the code does not install it again. It is compiled
# here: the user that runs it cannot write to /opt, so that every process would compile torch and vLLM anew.
COPY requirements/uv.txt requirements/build.txt requirements/cpu.txt requirements/
RUN python3.12 -m venv /opt/venv /opt/uv && /opt/uv/bin/pip install --no-cache-dir --require-hashes -r requirements/uv.txt \
    && /opt/uv/bin/uv pip sync --no-cache --compile-bytecode --python /opt/venv --require-hashes --build-constraints requirements/build.txt requirements/cpu.txt
COPY pyproject.toml README.md prefect.yaml ./
COPY flows flows
COPY tasks tasks
COPY environments environments
COPY infra infra
RUN /opt/uv/bin/uv pip install --no-cache --python /opt/venv --no-deps --editable . \
    && /opt/venv/bin/python -m compileall -q flows tasks environments infra \
    && useradd --uid 1000 --create-home policyflow && install -d -o 1000 /data
USER 1000
