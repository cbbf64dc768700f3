"""A stock script in the style of run_glue.py: nothing in it knows of privacy. Data and model are made up and tiny."""

import sys
from dataclasses import dataclass, field

import numpy as np
from transformers import BertConfig, BertForSequenceClassification, HfArgumentParser, default_data_collator
from transformers import Trainer, TrainingArguments


@dataclass
class DataTrainingArguments:
    max_seq_length: int = field(default=8)


def main(argv):
    parser = HfArgumentParser((DataTrainingArguments, TrainingArguments))
    data_args, training_args = parser.parse_args_into_dataclasses(argv)
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 2, 96)
    ids = rng.integers(3, 40, (96, data_args.max_seq_length))
    rows = [
        {"input_ids": row, "attention_mask": np.ones_like(row), "labels": int(label)}
        for row, label in zip(ids, labels, strict=True)
    ]
    model = BertForSequenceClassification(
        BertConfig(vocab_size=40, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
    )

    def compute_metrics(p):
        return {"accuracy": float((p.predictions.argmax(axis=1) == p.label_ids).mean())}

    trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=rows[:64] if training_args.do_train else None,
        eval_dataset=rows[64:] if training_args.do_eval else None,
        compute_metrics=compute_metrics,
        data_collator=default_data_collator,
    )
    if training_args.do_train:
        train_result = trainer.train()
        metrics = train_result.metrics
        metrics["train_samples"] = 64
        trainer.save_model()
        trainer.log_metrics("train", metrics)
        trainer.save_metrics("train", metrics)
        trainer.save_state()
    if training_args.do_eval:
        metrics = trainer.evaluate()
        trainer.log_metrics("eval", metrics)
        trainer.save_metrics("eval", metrics)
    trainer.create_model_card(finetuned_from="a tiny BERT", tasks="text-classification")
    return trainer


if __name__ == "__main__":
    main(sys.argv[1:])
