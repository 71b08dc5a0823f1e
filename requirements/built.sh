#!/usr/bin/env bash
# What the GPU lock has as source only: transformer-engine-torch, compiled against the torch of an environment that
# requirements/gpu.txt is installed in. Needs a C++ compiler and Python's headers, no GPU and no CUDA toolkit: headers, libraries and nvcc are the
# lock's own wheels.
#   requirements/built.sh UV VENV
# uv keeps the wheel, by the source's hash and the torch version: whatever asks for the same again takes it from there.
set -euo pipefail
uv=$1 venv=$2
cd "$(dirname "$0")/.."
nvidia=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib") + "/nvidia")')
torch=$("$venv/bin/python" -c 'import importlib.metadata as m; print(m.version("torch"))')
include=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("include"))')
command -v c++ >/dev/null || { echo "error: transformer-engine-torch is compiled here: install a C++ compiler (c++; build-essential)" >&2; exit 1; }
[ -f "$include/Python.h" ] || { echo "error: transformer-engine-torch is compiled here: Python's headers are not in $include (python3.12-dev)" >&2; exit 1; }
# Its setup.py would look for a wheel of its own elsewhere, without a hash.
export NVTE_PYTORCH_FORCE_BUILD=TRUE NVTE_FRAMEWORK=pytorch
export CUDA_HOME=$nvidia/cu13
export CPATH=$nvidia/cu13/include:$nvidia/nccl/include:$nvidia/cudnn/include${CPATH:+:$CPATH}
export LIBRARY_PATH=$nvidia/cu13/lib:$nvidia/nccl/lib:$nvidia/cudnn/lib${LIBRARY_PATH:+:$LIBRARY_PATH}
export PATH=$(cd "$venv" && pwd)/bin:$PATH MAX_JOBS=${MAX_JOBS:-$(nproc)}
exec "$uv" pip install --python "$venv" --no-deps --no-build-isolation --require-hashes -r requirements/built.txt \
  --config-settings-package "transformer-engine-torch:torch=$torch"
