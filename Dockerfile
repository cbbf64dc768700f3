# For GPU clusters. The bare CUDA base is enough: torch brings its own libraries.
#   docker build --build-arg UID="$(id -u)" -t hf_dpopt .
#   docker run --gpus all --shm-size 8g -v "$PWD/runs:/app/runs" -v "$HOME/.hf_dpopt:/app/private" hf_dpopt \
#       --num_processes 2 /opt/hf_dpopt/recipes/glue.py --output_dir runs/sst2 --target_epsilon 8 ...
# Both mounts belong to UID and outlive the container: the ledger in runs/*/privacy, because a forgotten ledger is a
# forgotten budget, and the keys in private, without which a run cannot be resumed on its chain of noise.
ARG BASE_IMAGE=nvidia/cuda:13.0.2-base-ubuntu24.04
FROM ${BASE_IMAGE}

# The same choice as in the Makefile, for a base image with another CUDA version.
ARG TORCH="torch==2.13.0"
ARG UID=10001

RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends make python3 python3-venv \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/hf_dpopt
COPY pyproject.toml constraints.txt Makefile README.md LICENSE ./
COPY hf_dpopt ./hf_dpopt
COPY recipes ./recipes
RUN PIP_NO_CACHE_DIR=1 make env VENV=/opt/venv EXTRAS=recipes TORCH="${TORCH}"

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
ENTRYPOINT ["accelerate", "launch"]
CMD ["/opt/hf_dpopt/recipes/glue.py"]
