# For GPU clusters. The bare CUDA base is enough: torch brings its own libraries.
#   docker build --build-arg UID="$(id -u)" -t hf_dpopt .
#   docker run --gpus all --shm-size 8g -v "$PWD/runs:/app/runs" -v "$HOME/.hf_dpopt:/app/private" hf_dpopt \
#       --num_processes 2 /opt/hf_dpopt/recipes/glue.py --output_dir runs/sst2 --target_epsilon 8 ...
# On several machines, with SLURM or Kubernetes: docs/clusters.md.
# Both mounts belong to UID and outlive the container: the ledger in runs/*/privacy, because a forgotten ledger is a
# forgotten budget, and the keys in private, without which a run cannot be resumed on its chain of noise.
ARG BASE_IMAGE=nvidia/cuda:13.0.2-base-ubuntu24.04
FROM ${BASE_IMAGE}

# The same choice as in the Makefile, for a base image with another CUDA version.
ARG TORCH="torch==2.13.0"
ARG UID=10001

# The compiler and the headers are for Triton, which builds the launcher of each kernel on the machine that it runs on;
# without them clipping falls back to slower torch code, with a warning.
RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
        gcc libc6-dev make python3 python3-dev python3-venv \
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
    && install -d -o trainer -m 0755 /app /app/runs \
    && install -d -o trainer -m 0700 /app/private
ENV PATH=/opt/venv/bin:${PATH} \
    HOME=/app \
    HF_DPOPT_PRIVATE_DIR=/app/private \
    PYTHONUNBUFFERED=1 \
    TOKENIZERS_PARALLELISM=false
WORKDIR /app
USER trainer
# A run needs both folders until its end; a mount that is gone or has become read-only is seen here first.
HEALTHCHECK --interval=5m --timeout=30s --start-period=1m CMD test -w /app/private && test -w /app/runs
ENTRYPOINT ["accelerate", "launch"]
CMD ["/opt/hf_dpopt/recipes/glue.py"]
