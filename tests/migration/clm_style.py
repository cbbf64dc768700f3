"""A stock script in the style of run_clm.py, one padded document per row: nothing in it knows of privacy."""

import math
import sys

import torch
from transformers import GPT2Config, GPT2LMHeadModel, HfArgumentParser
from transformers import Trainer, TrainingArguments


def pad(rows):
    width = max(len(row["input_ids"]) for row in rows)
    ids = torch.zeros(len(rows), width, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for b, row in enumerate(rows):
        ids[b, : len(row["input_ids"])] = torch.tensor(row["input_ids"])
        mask[b, : len(row["input_ids"])] = 1
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def main(argv):
    (training_args,) = HfArgumentParser((TrainingArguments,)).parse_args_into_dataclasses(argv)
    torch.manual_seed(0)
    documents = [{"input_ids": torch.randint(3, 40, (int(n),)).tolist()} for n in torch.randint(4, 20, (80,))]
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=40, n_embd=16, n_layer=1, n_head=2, n_positions=64, bos_token_id=0, eos_token_id=0)
    )
    trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=documents[:64] if training_args.do_train else None,
        eval_dataset=documents[64:] if training_args.do_eval else None,
        data_collator=pad,
    )
    if training_args.do_train:
        trainer.train()
        trainer.save_model()
        trainer.save_state()
    if training_args.do_eval:
        metrics = trainer.evaluate()
        metrics["perplexity"] = math.exp(metrics["eval_loss"])
        trainer.log_metrics("eval", metrics)
        trainer.save_metrics("eval", metrics)
    trainer.create_model_card(finetuned_from="a tiny GPT-2")
    return trainer


if __name__ == "__main__":
    main(sys.argv[1:])
