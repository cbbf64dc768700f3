# For GPU clusters. No CUDA base is needed: torch brings its own libraries, and the container toolkit the driver's.
#   docker build --build-arg UID="$(id -u)" -t hf_dpopt .
#   docker run --gpus all --shm-size 8g -v "$PWD/runs:/app/runs" -v "$HOME/.hf_dpopt:/app/private" \
#       -v "$HOME/.cache/huggingface:/app/cache" hf_dpopt \
#       --num_processes 2 /opt/hf_dpopt/recipes/glue.py --output_dir runs/sst2 --target_epsilon 8 ...
# On several machines, with SLURM or Kubernetes: docs/clusters.md.
# The mounts belong to UID and outlive the container: the ledger in runs/*/privacy, because a forgotten ledger is a
# forgotten budget; the keys in private, without which a run cannot be resumed with its noise; models in cache.
# The versions in constraints.txt were tested on this Python.
ARG BASE_IMAGE=python:3.11-slim-bookworm
FROM ${BASE_IMAGE}

# The same choice as in the Makefile. This torch is built for CUDA 13, which needs a driver of 580 or newer and a GPU of
# compute capability 7.5 or higher. For an older driver name a torch for CUDA 12, and CUDA=12.6.
ARG TORCH="torch==2.13.0"
ARG CUDA=13.0
ARG UID=10001

# The compiler is for Triton, which builds the launcher of each kernel on the machine that it runs on; without it clipping
# falls back to slower torch code, with a warning. The headers come with the base.
RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
        gcc libc6-dev make \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/hf_dpopt
COPY pyproject.toml constraints.txt Makefile README.md LICENSE ./
COPY hf_dpopt ./hf_dpopt
COPY recipes ./recipes
RUN PIP_NO_CACHE_DIR=1 make env VENV=/opt/venv EXTRAS=recipes TORCH="${TORCH}"

# Builds and loads an empty launcher as Triton does its own: an image that could not run the kernels is not finished.
RUN /opt/venv/bin/python -c "from triton.runtime.build import compile_module_from_src as build; build('#include <Python.h>\nstatic struct PyModuleDef d = {PyModuleDef_HEAD_INIT, \"probe\", 0, -1, 0};\nPyMODINIT_FUNC PyInit_probe(void) { return PyModule_Create(&d); }', 'probe')" \
    && rm -rf ~/.triton

# The program is not writable by the user that runs it; data, models and private state live under /app.
RUN useradd --non-unique --uid "${UID}" --no-create-home --home-dir /app --shell /usr/sbin/nologin trainer \
    && install -d -o trainer -m 0755 /app /app/runs /app/cache \
    && install -d -o trainer -m 0700 /app/private
# The three names of NVIDIA are for the container toolkit: it mounts the driver, and refuses one that is too old.
ENV PATH=/opt/venv/bin:${PATH} \
    HOME=/app \
    HF_DPOPT_PRIVATE_DIR=/app/private \
    HF_HOME=/app/cache \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    NVIDIA_REQUIRE_CUDA="cuda>=${CUDA}" \
    PYTHONUNBUFFERED=1 \
    TOKENIZERS_PARALLELISM=false
WORKDIR /app
USER trainer
# A run needs both folders until its end; a mount that is gone or has become read-only is seen here first.
HEALTHCHECK --interval=5m --timeout=30s --start-period=1m CMD test -w /app/private && test -w /app/runs
ENTRYPOINT ["accelerate", "launch"]
CMD ["/opt/hf_dpopt/recipes/glue.py"]
