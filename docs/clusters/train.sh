#!/usr/bin/env bash
# train.sh: one process per GPU. PROCESSES=2 bash train.sh
set -euo pipefail
export MODEL="${MODEL:-roberta-base}" TRAIN_FILES="${TRAIN_FILES:-data/train-*.parquet}"
export HF_DPOPT_PRIVATE_DIR="${HF_DPOPT_PRIVATE_DIR:-$HOME/.hf_dpopt}"
exec torchrun --standalone --nproc-per-node "${PROCESSES:-gpu}" --max-restarts 3 \
    --signals-to-handle SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1 --shutdown-timeout 300 \
    train.py --output_dir runs/one --target_epsilon 8 --max_steps "${STEPS:-1000}" \
    --per_device_train_batch_size 16 --expected_batch_size "${BATCH:-1024}" --learning_rate 5e-4 \
    --save_strategy steps --save_steps 100 --save_total_limit 2 --logging_steps 10 "$@"
