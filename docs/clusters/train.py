"""Train a classifier on rows that were tokenized before (`input_ids`, `label`), read from Parquet files."""

import os

from datasets import load_dataset
from transformers import AutoModelForSequenceClassification, AutoTokenizer, DataCollatorWithPadding, HfArgumentParser

from hf_dpopt import DPTrainer, DPTrainingArguments

if __name__ == "__main__":
    (args,) = HfArgumentParser(DPTrainingArguments).parse_args_into_dataclasses()
    model = AutoModelForSequenceClassification.from_pretrained(os.environ["MODEL"], num_labels=2)
    # memory-mapped: rows are read from the disk when they are drawn
    train_dataset = load_dataset("parquet", data_files=os.environ["TRAIN_FILES"], split="train")
    collator = DataCollatorWithPadding(AutoTokenizer.from_pretrained(os.environ["MODEL"]))
    trainer = DPTrainer(model=model, args=args, train_dataset=train_dataset, data_collator=collator)
    # begins where there is nothing to go on from
    trainer.train(resume_from_checkpoint=True)
    trainer.save_model()
