"""Trainer, accelerate and TRL with every architecture, and the papers' parameter groups."""

import copy
import functools
import importlib
import itertools
import math
import re
import sys

import numpy as np
import pytest
import torch
import transformers
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from cases import (
    CASES,
    CAUSAL,
    ENCODERS,
    LINEAR,
    each_model,
    model_class,
    random_ids,
    tiny_config,
    tiny_model,
)
from transformers import (
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    DataCollatorForTokenClassification,
    DataCollatorWithFlattening,
    DataCollatorWithPadding,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
)
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.modeling_outputs import CausalLMOutputWithPast

import subquad.modeling.heads
from subquad import ARCHITECTURES
from subquad.training.losses import l2wrap_loss
from subquad.training.optimizer import parameter_groups
from subquad_tokenizers import WORLD_CHAT_TEMPLATE, ByteTokenizer


# rwkv5 differs from rwkv6 in its operator alone, and rwkv7_deep_embed trains all that rwkv7 has.
each_trained = pytest.mark.parametrize(
    "model_type", [name for name in CAUSAL | ENCODERS if name not in ("rwkv5", "rwkv7")]
)
# All causal models have the same other heads.
each_trained_head = pytest.mark.parametrize(
    ("model_type", "auto_class"),
    [
        (name, head)
        for name in CAUSAL | ENCODERS
        for head in ARCHITECTURES[name][2]
        if head != "AutoModel" and (head == "AutoModelForCausalLM" or name in ("rwkv6", "avey-b"))
    ],
)


@each_model
def test_gradients_of_functions(model_type):
    """`torch.func.grad`, and one gradient per text with `vmap`, are those of `backward`."""
    model, ids = tiny_model(model_type).eval(), random_ids(2, 9)
    weights = {name: p.detach() for name, p in model.named_parameters()}

    def loss(weights, ids):
        return torch.func.functional_call(model, weights, kwargs={"input_ids": ids, "labels": ids}).loss

    def expected(ids):
        model.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        return {
            name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in model.named_parameters()
        }

    close = functools.partial(torch.testing.assert_close, atol=1e-5, rtol=1e-4)
    close(torch.func.grad(loss)(weights, ids), expected(ids))
    each = torch.func.vmap(torch.func.grad(lambda weights, row: loss(weights, row[None])), (None, 0))(weights, ids)
    for n in range(2):
        close({name: grad[n] for name, grad in each.items()}, expected(ids[n : n + 1]))
    with pytest.raises(ValueError, match="`position_ids` cannot be read under `torch.func`"):
        torch.func.vmap(lambda row: model(row[None], position_ids=torch.arange(9)[None]).logits)(ids)


def new_model(model_type, **fields):
    """A model as it is before its training."""
    torch.manual_seed(0)
    fields = {**CASES[model_type].dropout, **fields}
    if hasattr(CASES[model_type].config(), "initializer_range"):
        fields = {"initializer_range": 0.01, **fields}
    return model_class(model_type)(tiny_config(model_type, **fields))


def trainer_of(model, path, data, optimizer=torch.optim.AdamW, lr=1e-2, arguments=None, **options):
    arguments = {
        "per_device_train_batch_size": 4,
        "save_strategy": "no",
        "logging_steps": 1,
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        **(arguments or {}),
    }
    return Trainer(
        model=model,
        args=TrainingArguments(str(path), **arguments),
        train_dataset=data,
        optimizer_cls_and_kwargs=(optimizer, {"params": parameter_groups(model, lr)}),
        **options,
    )


def losses(trainer) -> list[float]:
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


def texts(rows, length):
    return [{"input_ids": row, "labels": row} for row in random_ids(rows, length)]


# Parameter groups.


@pytest.mark.fast
@each_model
def test_groups_are_those_of_the_paper(model_type):
    model = tiny_model(model_type)
    optimizer = torch.optim.AdamW(parameter_groups(model, lr=3e-4))
    of = {parameter: group for group in optimizer.param_groups for parameter in group["params"]}
    assert len(of) == sum(len(group["params"]) for group in optimizer.param_groups)
    assert set(of) == set(model.parameters())
    for name, parameter in model.named_parameters():
        group, expected = of[parameter], {"lr": 3e-4, "eps": 1e-8, **CASES[model_type].optimizer}
        if parameter.ndim < 2 or re.search(CASES[model_type].not_decayed, name):
            expected["weight_decay"] = 0.0
        if re.search(CASES[model_type].twice_the_rate, name):
            expected["lr"] = 6e-4
        assert {key: group[key] for key in expected} == expected, name
    other = torch.optim.AdamW(parameter_groups(model, lr=1.0, weight_decay=0.3))
    assert {group["weight_decay"] for group in other.param_groups} == {0.3, 0.0}


@each_model
def test_groups_of_wrapped_tied_and_frozen_models(model_type):
    from peft import LoraConfig, get_peft_model

    def grouped(model):
        return [parameter for group in parameter_groups(model, lr=1.0) for parameter in group["params"]]

    model = tiny_model(model_type, tie_word_embeddings=True)
    model.get_input_embeddings().requires_grad_(False)
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    assert sorted(map(id, grouped(model))) == sorted(map(id, trainable))
    assert sorted(map(id, grouped(torch.compile(model)))) == sorted(map(id, trainable))
    config = LoraConfig(target_modules="all-linear", trainable_token_indices=[3, 5])
    adapted = get_peft_model(tiny_model(model_type, "AutoModelForSequenceClassification"), config)
    trainable = [parameter for parameter in adapted.parameters() if parameter.requires_grad]
    assert trainable and sorted(map(id, grouped(adapted))) == sorted(map(id, trainable))
    decays = {group["weight_decay"] for group in parameter_groups(adapted, lr=1.0, weight_decay=0.5)}
    assert decays == {0.5, 0.0}  # adapters are matrices, the tokens' rows are none


def test_groups_of_an_unknown_model():
    with pytest.raises(ValueError, match="`model` is a Linear of model type None"):
        parameter_groups(torch.nn.Linear(1, 1), lr=1.0)
    config = transformers.GPT2Config(n_layer=1, n_embd=4, n_head=1, vocab_size=8, bos_token_id=0, eos_token_id=0)
    with pytest.raises(ValueError, match="a GPT2Model of model type 'gpt2', and there are recipes for .*rwkv5, "):
        parameter_groups(transformers.GPT2Model(config), lr=1.0)


@pytest.mark.parametrize(("name", "value"), [("lr", -1.0), ("lr", float("nan")), ("weight_decay", -0.1)])
def test_wrong_numbers_of_groups(name, value):
    with pytest.raises(ValueError, match=f"`{name}` must be at least 0 and finite, got {value}"):
        parameter_groups(tiny_model("rwkv7"), **{"lr": 1.0, name: value})


# Trainer.


@pytest.mark.quick_cases("rwkv6", "raven", "avey-b")
@each_trained
def test_trainer(model_type, tmp_path):
    """Learns; the seed decides the curve; a resumed run goes on with it; what saves memory leaves it as it is."""
    data = texts(8, 20)

    def train(path, resume=None, **arguments):
        arguments = {"max_steps": 6, "save_strategy": "steps", "save_steps": 3, **arguments}
        # The evaluation takes random numbers: every run has one.
        arguments |= {"eval_strategy": "steps", "eval_steps": 3}
        trainer = trainer_of(new_model(model_type), tmp_path / path, data, eval_dataset=data[:3], arguments=arguments)
        trainer.train(resume_from_checkpoint=resume)
        return losses(trainer), trainer.model.state_dict(), trainer

    curve, weights, trainer = train("whole")
    assert len(curve) == 6 and curve[-1] < curve[0] - 0.3
    shares = [group["lr"] / group["initial_lr"] for group in trainer.optimizer.param_groups]
    assert shares == [0] * len(shares)
    checkpoint = tmp_path / "whole" / "checkpoint-3"
    again, resumed, _ = train("resumed", resume=str(checkpoint))
    assert again == curve
    saving, saved, trainer = train("saving", save_strategy="no", gradient_checkpointing=True)
    assert saving == pytest.approx(curve, rel=1e-5) and trainer.model.is_gradient_checkpointing
    for name, weight in weights.items():
        assert torch.equal(weight, resumed[name]), name
        torch.testing.assert_close(weight, saved[name])
    # The same run, but the best checkpoint, here the first, is loaded at the end.
    best = {"load_best_model_at_end": True, "metric_for_best_model": "loss", "greater_is_better": True}
    same, loaded, _ = train("best", **best)
    assert same == curve
    for name, weight in type(trainer.model).from_pretrained(checkpoint).state_dict().items():
        assert torch.equal(weight, loaded[name]), name
    low, weights, _ = train("low", save_strategy="no", bf16=True)
    assert low != curve and low == pytest.approx(curve, rel=0.05)
    assert {weight.dtype for weight in weights.values() if weight.is_floating_point()} == {torch.float32}


def rows_for(auto_class):
    """A dataset of texts of several lengths, and the collator that its model needs."""
    tokenizer = ByteTokenizer(padding_side="right")
    rows = [{"input_ids": random_ids(n, seed=n)} for n in range(13, 21)]
    for n, row in enumerate(rows):
        ids = row["input_ids"]
        if auto_class == "AutoModelForSequenceClassification":
            row["labels"] = n % 3
        elif auto_class == "AutoModelForQuestionAnswering":
            row |= {"start_positions": n, "end_positions": n + 3}
        elif auto_class == "AutoModelForTokenClassification":
            row["labels"] = (ids % 3).tolist()
        else:
            row["labels"] = ids.where(ids % 2 == 0, -100).tolist()
    is_of_tokens = "labels" in rows[0] and auto_class != "AutoModelForSequenceClassification"
    return rows, (DataCollatorForTokenClassification if is_of_tokens else DataCollatorWithPadding)(tokenizer)


@each_trained_head
def test_heads(model_type, auto_class, tmp_path):
    """Parts of a batch weigh what they weigh in the batch; label smoothing; evaluation with its metrics."""
    rows, collator = rows_for(auto_class)
    fields = dict(CASES[model_type].quiet)
    if auto_class.endswith("Classification"):
        fields["num_labels"] = 3

    def trainer(batch_size, model=None, **arguments):
        arguments |= {"per_device_train_batch_size": batch_size, "gradient_accumulation_steps": 8 // batch_size}
        # Adam makes much of gradients that are rounding errors.
        return trainer_of(
            model or tiny_model(model_type, auto_class, **fields),
            *(tmp_path, rows, torch.optim.SGD, 1e-3),
            data_collator=collator,
            eval_dataset=rows,
            compute_metrics=lambda prediction: {"shape": np.shape(prediction.predictions)},
            arguments={"max_steps": 2, "per_device_eval_batch_size": 3, **arguments},
        )

    whole, parts, smooth = trainer(8), trainer(2), trainer(8, label_smoothing_factor=1e-9)
    for one in (whole, parts, smooth):
        one.train()
    assert losses(parts) == pytest.approx(losses(whole), rel=1e-4)
    for (name, p), q in zip(whole.model.named_parameters(), parts.model.parameters(), strict=True):
        torch.testing.assert_close(p, q, atol=1e-5, rtol=1e-4, msg=name)
    assert losses(smooth) == pytest.approx(losses(whole), rel=1e-4)

    out = whole.predict(rows)
    predictions = out.predictions if isinstance(out.predictions, tuple) else (out.predictions,)
    assert out.metrics["test_shape"] == np.shape(out.predictions) and np.isfinite(out.metrics["test_loss"])
    model = whole.model.eval()
    with torch.no_grad():
        batch = collator([dict(row) for row in rows[:3]])
        batch.pop("labels", None)
        expected = [x for name, x in model(**batch).items() if name.endswith("logits")]
    assert len(predictions) == len(expected)
    for prediction, logits in zip(predictions, expected, strict=True):
        assert len(prediction) == len(rows)
        found = torch.tensor(prediction[:3, : logits.shape[1]])  # it has more columns if another batch has more
        torch.testing.assert_close(found, logits, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("model_type", ["rwkv6", "avey-b"])
@pytest.mark.parametrize("problem", ["regression", "multi_label_classification"])
def test_parts_of_a_batch_with_several_targets(model_type, problem, tmp_path):
    data = [{"input_ids": row, "labels": [float(n % 2), 0.5, 1.0]} for n, row in enumerate(random_ids(8, 10))]
    curves = []
    for parts in (1, 4):
        fields = CASES[model_type].quiet | {"num_labels": 3, "problem_type": problem}
        model = tiny_model(model_type, "AutoModelForSequenceClassification", **fields)
        arguments = {"max_steps": 2, "per_device_train_batch_size": 8 // parts, "gradient_accumulation_steps": parts}
        trainer = trainer_of(model, tmp_path, data, torch.optim.SGD, 1e-3, arguments)
        trainer.train()
        curves.append(losses(trainer))
    assert curves[1] == pytest.approx(curves[0], rel=1e-4)


@pytest.mark.parametrize("model_type", ["rwkv6", "avey"])
def test_padding_side(model_type, tmp_path, monkeypatch):
    """Training and evaluation report the same on either side. Where the Trainer cannot do so, there is a warning."""
    rows, warned = [{"input_ids": random_ids(n, seed=n)} for n in (5, 20, 11, 8)], []
    monkeypatch.setattr(subquad.modeling.heads.logger, "warning_once", warned.append)

    def curve(side, size=4, **options):
        trainer = trainer_of(
            tiny_model(model_type, **CASES[model_type].quiet),
            *(tmp_path, rows, torch.optim.SGD, 1e-2),
            data_collator=DataCollatorForLanguageModeling(ByteTokenizer(padding_side=side), mlm=False),
            eval_dataset=rows,
            compute_loss_func=options.pop("compute_loss_func", None),
            arguments={
                "max_steps": 2,
                "per_device_train_batch_size": size,
                "gradient_accumulation_steps": 4 // size,
                **options,
            },
        )
        trainer.train()
        return [*losses(trainer), trainer.evaluate()["eval_loss"]]

    expected = curve("right")
    assert curve("left") == pytest.approx(expected, rel=1e-5)
    assert curve("right", size=2)[:2] == pytest.approx(expected[:2], rel=1e-5)
    assert not warned
    for options in ({"size": 2}, {"label_smoothing_factor": 0.1}, {"compute_loss_func": l2wrap_loss}):
        curve("right", **options)
        assert not warned
        curve("left", **options)
        assert warned and "Pad on the right in training" in warned[0]
        warned.clear()


def test_compiled_trainer(tmp_path, monkeypatch):
    """With packed texts: compiled code reads the boundaries from `cu_seq_lens_q` alone."""
    # The arguments set the backend for every Accelerator of the process.
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "no")
    monkeypatch.setattr(AcceleratorState, "_shared_state", {})
    rows = [{"input_ids": random_ids(n, seed=n)} for n in (3, 10, 6, 7, 9, 4, 5, 8)]
    collator, curves = DataCollatorWithFlattening(return_flash_attn_kwargs=True), []
    for compiled in ({}, {"torch_compile": True, "torch_compile_backend": "aot_eager"}):
        arguments = {"max_steps": 2, "train_sampling_strategy": "sequential", **compiled}
        trainer = trainer_of(
            new_model("rwkv6", num_hidden_layers=1), tmp_path, rows, data_collator=collator, arguments=arguments
        )
        trainer.train()
        curves.append(losses(trainer))
    assert curves[1] == pytest.approx(curves[0], rel=1e-4)


@pytest.mark.fast
def test_l2wrap_pulls_the_largest_logits():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 5, 7, dtype=torch.float64, generator=generator, requires_grad=True)
    labels = torch.tensor([[1, 2, 3, -100, 5], [0, -100, 6, 1, 2]])
    outputs = CausalLMOutputWithPast(logits=logits)
    for count in (None, 6, torch.tensor(20)):
        plain = ForCausalLMLoss(logits, labels, 7, count)
        pulled = l2wrap_loss(outputs, labels, count, factor=0.1)
        torch.testing.assert_close(pulled, plain)
        expected = torch.zeros_like(logits)
        for row, position in ((0, 0), (0, 1), (0, 3), (1, 1), (1, 2), (1, 3)):  # those whose next label counts
            best = logits[row, position].argmax()
            expected[row, position, best] = 0.1 * logits[row, position, best] / (6 if count is None else count)
        pull = torch.autograd.grad(pulled, logits)[0] - torch.autograd.grad(plain, logits)[0]
        torch.testing.assert_close(pull, expected, rtol=1e-4, atol=1e-6)
    for count in (None, 0):
        loss = l2wrap_loss(outputs, torch.full_like(labels, -100), count)
        assert loss == 0 and not torch.autograd.grad(loss, logits)[0].any()


# accelerate.


@each_trained
def test_accelerate(model_type, tmp_path):
    """A loop of one's own: parts of a batch, and a state that is saved and loaded in its middle."""
    data = random_ids(4, 20).split(2) * 4

    def train(data, load=None):
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        model = new_model(model_type).train()
        optimizer = torch.optim.AdamW(parameter_groups(model, lr=1e-2))
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=4)
        model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
        if load is not None:
            accelerator.load_state(load)
        curve = []
        for ids in data:
            with accelerator.accumulate(model):
                loss = model(ids, labels=ids).loss
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            curve.append(loss.item())
        return accelerator, curve

    accelerator, first = train(data[:4])
    accelerator.save_state(tmp_path / "state")
    whole, rest = train(data)[1], train(data[4:], tmp_path / "state")[1]
    assert first + rest == whole
    assert sum(whole[-2:]) < sum(whole[:2])


# TRL.


@pytest.mark.quick_cases("rwkv6", "gecko")
@pytest.mark.parametrize("model_type", ["rwkv6", "rwkv7_deep_embed", "avey", "gecko"])
def test_trl(model_type, tmp_path):
    """Packed supervised fine-tuning, preferences, and rewards of what is generated in training."""
    import trl
    from datasets import Dataset
    from peft import LoraConfig

    fields = CASES[model_type].quiet
    model = tiny_model(model_type, vocab_size=128, bos_token_id=0, eos_token_id=0, pad_token_id=0, **fields)
    tokenizer, directory = ByteTokenizer(), str(tmp_path / "model")
    # TRL loads references, and models, by such a name, and looks for an `auto_map` there.
    model.save_pretrained(directory, self_contained=True)
    model = type(model).from_pretrained(directory)
    shared = {"output_dir": str(tmp_path), "max_steps": 1, "per_device_train_batch_size": 4, "learning_rate": 1e-3}
    shared |= {"report_to": [], "disable_tqdm": True, "use_cpu": True, "save_strategy": "no", "bf16": False}
    shared |= {"logging_steps": 1}

    def train(trainer_class, arguments, rows, **options):
        data, new = Dataset.from_list(rows), copy.deepcopy(model)
        new = directory if trainer_class is trl.SFTTrainer else new
        trainer = trainer_class(new, args=arguments, train_dataset=data, processing_class=tokenizer, **options)
        before = [p.detach().clone() for p in trainer.model.parameters() if p.requires_grad]
        trainer.train()
        after = [p for p in trainer.model.parameters() if p.requires_grad]
        assert any(not torch.equal(p, q) for p, q in zip(before, after, strict=True))
        return trainer

    rows = [{"prompt": f"tune {n}\n", "completion": "ABC def|"[n:] * (1 + n % 4)} for n in range(8)]
    # TRL does not require attention that knows the boundaries.
    packing = trl.SFTConfig(packing=True, max_length=64, gradient_checkpointing=False, **shared)
    trainer = train(trl.SFTTrainer, packing, rows)
    batch = next(iter(trainer.get_train_dataloader()))
    begins = (batch["position_ids"][0] == 0).nonzero().flatten().tolist()
    assert len(batch["input_ids"]) == 1 and len(begins) > 4
    total, items = 0.0, 0
    with torch.no_grad():
        for begin, end in itertools.pairwise([*begins, batch["input_ids"].shape[1]]):
            labels = batch["labels"][:, begin + 1 : end]
            logits = trainer.model(batch["input_ids"][:, begin:end]).logits[:, :-1]
            total += torch.nn.functional.cross_entropy(logits[0], labels[0], reduction="sum")
            items += (labels != -100).sum()
        loss = trainer.compute_loss(trainer.model, batch)
    torch.testing.assert_close(loss, total / items)

    pairs = [{"prompt": row["prompt"], "chosen": row["completion"], "rejected": "zzz"} for row in rows]
    lora = LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear")
    for options in ({}, {"peft_config": lora}):
        trainer = train(trl.DPOTrainer, trl.DPOConfig(**shared), pairs, **options)
        assert losses(trainer) == pytest.approx([math.log(2)])  # the model is still its reference

    told = []

    def reward(completions, **kwargs):
        told.extend(completions)
        return [float(sum(map(ord, completion))) for completion in completions]

    shared |= {"num_generations": 4, "max_completion_length": 6, "beta": 0.1}
    shared["use_transformers_continuous_batching"] = not CASES[model_type].growing
    for name, options in (("GRPO", {}), ("RLOO", {"peft_config": lora})):
        arguments = getattr(trl, f"{name}Config")(**shared)
        train(getattr(trl, f"{name}Trainer"), arguments, rows, reward_funcs=reward, **options)
        assert len(told) == 4 and all(len(completion) <= 6 for completion in told)
        told.clear()


def test_trl_on_answers_alone(tmp_path):
    """`assistant_only_loss` with a tokenizer from files, whose template has the marks of answers in comments."""
    import trl
    from datasets import Dataset

    model = tiny_model("rwkv6", vocab_size=128, bos_token_id=0, eos_token_id=0, pad_token_id=0)
    ByteTokenizer(chat_template=WORLD_CHAT_TEMPLATE).save_pretrained(tmp_path)
    chats = [[("user", "Hi"), ("assistant", "Ho")], [("user", "A"), ("assistant", "B\n\nC"), ("user", "D")]]
    rows = [{"messages": [{"role": role, "content": text} for role, text in chat]} for chat in chats]
    shared = {"output_dir": str(tmp_path / "out"), "per_device_train_batch_size": 2, "report_to": [], "use_cpu": True}
    arguments = trl.SFTConfig(assistant_only_loss=True, bf16=False, max_steps=1, save_strategy="no", **shared)

    def make(tokenizer):
        data = Dataset.from_list(rows)
        return trl.SFTTrainer(model, args=arguments, train_dataset=data, processing_class=tokenizer)

    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    trainer = make(tokenizer)
    labels = next(iter(trainer.get_train_dataloader()))["labels"]
    assert {tokenizer.decode(row[row != -100]) for row in labels} == {" Ho\n\n", " B\n\nC\n\n"}
    assert torch.isfinite(torch.tensor(trainer.train().training_loss))
    # Without the code of the tokenizer nothing is trained on by mistake.
    with pytest.raises(RuntimeError, match="at least one example has no assistant"):
        make(PreTrainedTokenizerFast.from_pretrained(tmp_path))


# The examples.


@pytest.fixture
def run_example(capsys, monkeypatch):
    """Runs an example in this process on few tunes, 40 of them held out: the module, those, and what it prints."""
    tunes = importlib.import_module("abc_corpus").load_corpus(("miscFolk",)).train

    def run(name, *arguments):
        module = importlib.import_module(name)
        monkeypatch.setattr(module, "load_corpus", lambda folders: (tunes[40:], tunes[:40]))
        monkeypatch.setattr(torch, "set_num_threads", lambda number: None)
        monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
        capsys.readouterr()
        module.main()
        return module, tunes[:40], capsys.readouterr().out

    return run


def save_tiny(model_type, path):
    model = tiny_model(model_type, vocab_size=128, bos_token_id=0, eos_token_id=0, pad_token_id=0)
    model.save_pretrained(path)
    ByteTokenizer().save_pretrained(path)
    return path


@pytest.mark.parametrize("model_type", [None, "avey-b"])
def test_classifier_example(model_type, tmp_path, run_example):
    arguments = ["--output", tmp_path / "metre", "--epochs", 0.5, "--length", 24]
    if model_type is not None:
        arguments += ["--model", save_tiny(model_type, tmp_path / "model"), "--lora"]
    module, tunes, out = run_example("finetune_classifier", *arguments)
    trained, whole = (int(x.replace(",", "")) for x in re.search(r"([\d,]+) of ([\d,]+) parameters", out).groups())
    assert trained == whole if model_type is None else 0 < trained < whole / 2
    # What was saved is what was measured.
    classify = transformers.pipeline("text-classification", model=str(tmp_path / "metre"), device="cpu")
    pairs = [module.split(tune) for tune in tunes]
    answers = [
        classify(text, truncation=True, max_length=24)[0]["label"] == metre
        for text, metre in pairs
        if metre in classify.model.config.label2id
    ]
    found, share = re.search(r"(\d+) tunes held out: ([\d.]+)% right; always ", out).groups()
    assert int(found) == len(answers) > 30
    assert float(share) == pytest.approx(100 * sum(answers) / len(answers), abs=0.1)
    assert len(re.findall(r"is in \S+; \S+/metre says \d/\d \(\d+%\)", out)) == 3


def test_sft_example(tmp_path, run_example):
    arguments = ["--output", tmp_path / "out", "--steps", 2, "--orders", 2, "--max-new-tokens", 12]
    module, tunes, out = run_example("finetune_sft", *arguments)
    pattern = r"(before|after) training, \d of 2 tunes have .*; the first is\n(% a tune in \S+ and \S+\n)(.*)"
    (_, prompt, first), (_, again, second) = re.findall(pattern, out)
    assert prompt == again and first != second
    # What was saved is what was tried.
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    texts = module.fill(model, tokenizer, [module.order(tune)["prompt"] for tune in tunes[:2]], 12, 0)
    assert texts[0].split("\n")[0] == second

    options = ["--lora", "--packing", "--bf16", "--gradient-checkpointing", "--length", 256, "--batch-size", 2]
    options += ["--model", save_tiny("gecko", tmp_path / "model")]
    assert "after training" in run_example("finetune_sft", *arguments, *options)[2]
    before, after = (
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name).state_dict() for name in ("model", "out")
    )
    assert {name for name in before if not torch.equal(before[name], after[name])} == {
        name for name in before if name.removesuffix(".weight").endswith(tuple(LINEAR["gecko"]))
    }
