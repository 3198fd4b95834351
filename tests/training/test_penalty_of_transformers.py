"""The penalty with the loss that a model of transformers computes itself, under LoRA and in its Trainer."""

import copy
import warnings

import pytest
import torch
from torch import nn

import pyflatness as pf

transformers = pytest.importorskip("transformers")

WORDS, LENGTH = 20, 6
SIZES = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
HEAD, LAYER = "lm_head", "model.layers.0.mlp.down_proj"


def llama():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(vocab_size=WORDS, attn_implementation="eager", **SIZES)
    return transformers.LlamaForCausalLM(config).double().train()


def bert(**options):
    torch.manual_seed(0)
    config = transformers.BertConfig(vocab_size=WORDS, max_position_embeddings=LENGTH, **SIZES, **options)
    config._attn_implementation = "eager"
    config.hidden_dropout_prob = config.attention_probs_dropout_prob = 0.0
    return config


def tokens(samples=5):
    drawn = torch.randint(2, WORDS, (samples, LENGTH), generator=torch.Generator().manual_seed(1))
    labels = drawn.clone()
    labels[0, :3] = -100
    return {"input_ids": drawn, "labels": labels}


def seeded():
    return torch.Generator().manual_seed(2)


def gradients(model):
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("whole", [False, True], ids=["labels", "batch"])
def test_a_language_models_labels_are_shifted_as_it_shifts_them(whole):
    model, batch = llama(), tokens()
    with pf.FlatnessPenalty(model, [HEAD, LAYER], "auto", generator=seeded()) as penalty:
        found = penalty(model(**batch), batch if whole else batch["labels"])
    with pf.FlatnessPenalty(model, [HEAD, LAYER], nn.CrossEntropyLoss(), generator=seeded()) as penalty:
        logits = model(**batch).logits
        expected = penalty(logits[:, :-1].movedim(-1, 1), batch["labels"][:, 1:])
    assert found.item() == pytest.approx(expected.item(), rel=1e-12)


LABELS = torch.tensor([0.3, -1.0, 2.0, 0.1]).double()
CASES = {
    "classes": ({"num_labels": 3}, torch.arange(4) % 3, nn.CrossEntropyLoss(), lambda y: y),
    "values": ({"num_labels": 1}, LABELS, nn.MSELoss(), lambda y: y.unsqueeze(1)),
    "binary": (
        {"num_labels": 2, "problem_type": "multi_label_classification"},
        (LABELS[:, None] > torch.tensor([0.0, 0.2])).double(),
        nn.BCEWithLogitsLoss(),
        lambda y: y,
    ),
}


@pytest.mark.parametrize(("options", "labels", "loss", "as_targets"), CASES.values(), ids=CASES)
def test_the_loss_is_that_of_the_models_labels(options, labels, loss, as_targets):
    model = transformers.BertForSequenceClassification(bert(**options)).double().train()
    batch = {"input_ids": tokens(4)["input_ids"], "labels": labels}
    with pf.FlatnessPenalty(model, "classifier", "auto", generator=seeded()) as penalty:
        found = penalty(model(**batch), labels)
    with pf.FlatnessPenalty(model, "classifier", loss, generator=seeded()) as penalty:
        expected = penalty(model(**batch).logits, as_targets(labels))
    assert found.item() == pytest.approx(expected.item(), rel=1e-12)
    told = {**batch, "num_items_in_batch": torch.tensor(9)}  # of which BERT's losses take no notice
    with pf.FlatnessPenalty(model, "classifier", "auto", generator=seeded()) as penalty:
        assert penalty(model(**told), told).item() == pytest.approx(expected.item(), rel=1e-12)


def test_answers_in_a_text():
    model = transformers.BertForQuestionAnswering(bert()).double().train()
    batch = {
        "input_ids": tokens(4)["input_ids"],
        "start_positions": torch.tensor([0, 1, 2, 3]),
        "end_positions": torch.tensor([1, 1, 5, 4]),
    }
    probes = 400
    with pf.FlatnessPenalty(model, "qa_outputs", "auto", probes, generator=seeded()) as penalty:
        found = penalty(model(**batch), batch)
    exact = pf.relative_flatness(model.eval(), "auto", [batch], "qa_outputs")
    assert found.item() == pytest.approx(exact.value, rel=0.1)


def test_items_of_a_batch_count_as_in_the_models_loss():
    """Micro-batches whose sums are divided by the items of all have the penalty of the whole batch."""
    model, batch = llama(), tokens()
    items = int((batch["labels"][:, 1:] != -100).sum())
    parts = [{name: part[rows] for name, part in batch.items()} for rows in (slice(0, 2), slice(2, 5))]
    with pf.FlatnessPenalty(model, HEAD, "auto", 400, generator=seeded()) as penalty:
        given = [{**part, "num_items_in_batch": items} for part in parts]
        found = sum(penalty(model(**part), part).item() for part in given)
    exact = pf.relative_flatness(model.eval(), "auto", [batch], HEAD)
    assert found == pytest.approx(exact.value, rel=0.05)


def test_another_loss_of_the_models_is_an_error():
    model, batch = llama(), tokens()
    with pf.FlatnessPenalty(model, HEAD, "auto") as penalty:
        outputs = model(**batch)
        outputs["loss"] = outputs.loss + 1
        with pytest.raises(pf.errors.InputError, match="has a loss of its own"):
            penalty(outputs, batch)
    with pytest.raises(pf.errors.InputError, match="a Sequential is none; pass the loss"):
        pf.FlatnessPenalty(nn.Sequential(nn.Linear(2, 2)), "0", "auto")


def test_adapters_of_lora():
    """The penalty of an adapter's matrix is that of the layer it is, and moves the adapters alone."""
    peft = pytest.importorskip("peft", reason="peft is not installed")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of names that peft uses
        model = peft.get_peft_model(llama(), peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"]))
    model = model.double().train()
    torch.manual_seed(3)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter)
    batch = tokens()
    layers = [name for name in pf.layers(model) if name.endswith("down_proj.lora_B.default")]
    assert len(layers) == 1
    with pf.FlatnessPenalty(model, layers, "auto", 600, generator=seeded()) as penalty:
        outputs = model(**batch)
        value = penalty(outputs, batch)
        value.backward()
    assert all("lora_" in name for name in gradients(model))
    assert any(gradient.abs().sum() > 0 for gradient in gradients(model).values())
    exact = pf.measure(model.eval(), "auto", [batch], layers=layers, curvature="ggn")[layers[0], "relative_flatness"]
    assert value.item() == pytest.approx(exact.value, rel=0.1)


class Plain(nn.Module):
    """A model of the user's own for a trainer of transformers."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.words, self.head = nn.Embedding(WORDS, 8), nn.Linear(8, 3)

    def forward(self, input_ids, labels=None):
        logits = self.head(self.words(input_ids).mean(dim=1))
        loss = None if labels is None else nn.functional.cross_entropy(logits, labels)
        return transformers.modeling_outputs.SequenceClassifierOutput(loss=loss, logits=logits)


class TestCallback:
    @pytest.fixture(autouse=True)
    def _needs_accelerate(self):
        pytest.importorskip("accelerate")

    def trained(self, folder, model, *callbacks, samples=6, compute_loss_func=None, **options):
        batch = tokens(samples)
        if isinstance(model, Plain):
            batch["labels"] = torch.arange(samples) % 3
        rows = [{name: part[row] for name, part in batch.items()} for row in range(samples)]
        quiet = {"report_to": "none", "save_strategy": "no", "use_cpu": True, "disable_tqdm": True, "logging_steps": 1}
        few = {"max_steps": 1, "per_device_train_batch_size": samples, "optim": "sgd", "learning_rate": 0.1, **quiet}
        arguments = transformers.TrainingArguments(str(folder), max_grad_norm=0.0, **{**few, **options})
        given = {"train_dataset": rows, "eval_dataset": rows, "compute_loss_func": compute_loss_func}
        trainer = transformers.Trainer(model, arguments, callbacks=[*callbacks], **given)
        trainer.train()
        return trainer

    @staticmethod
    def callback(*arguments, **options):
        from pyflatness.integrations.transformers import PenaltyCallback

        return PenaltyCallback(*arguments, **options)

    def test_a_step_is_that_of_the_loss_and_the_penalty(self, tmp_path):
        model, batch = llama(), tokens(6)
        own = copy.deepcopy(model)
        with pf.FlatnessPenalty(own, HEAD, "auto", 400, generator=seeded()) as penalty:
            outputs = own(**batch)
            (outputs.loss + 0.5 * penalty(outputs, batch)).backward()
        before = copy.deepcopy(model)
        trainer = self.trained(tmp_path, model, self.callback(HEAD, 0.5, probes=400))
        for name, parameter in model.named_parameters():
            step = before.get_parameter(name) - parameter
            expected = 0.1 * own.get_parameter(name).grad
            assert (step - expected).norm() <= 0.1 * expected.norm() + 1e-12
        plain = self.trained(tmp_path, copy.deepcopy(before))
        with torch.no_grad():
            penalty_alone = 0.5 * pf.relative_flatness(before.eval(), "auto", [batch], HEAD).value
        losses = [each.state.log_history[0]["loss"] for each in (trainer, plain)]
        assert losses[0] - losses[1] == pytest.approx(penalty_alone, rel=0.1)
        assert not model._forward_hooks  # taken off at the end

    def test_accumulated_gradients_are_those_of_the_whole_batch(self, tmp_path):
        steps = []
        for size, parts in ((6, 1), (2, 3)):
            model = llama()
            options = {"per_device_train_batch_size": size, "gradient_accumulation_steps": parts}
            self.trained(tmp_path, model, self.callback(HEAD, 5.0, probes=400), **options)
            steps.append(model.get_parameter("lm_head.weight") - llama().get_parameter("lm_head.weight"))
        assert (steps[0] - steps[1]).norm() <= 0.1 * steps[0].norm()

    def test_evaluation_has_the_models_own_loss(self, tmp_path):
        model = llama()
        trainer = self.trained(tmp_path, model, self.callback(HEAD, 100.0), learning_rate=0.0, eval_strategy="steps")
        found = trainer.state.log_history
        plain = self.trained(tmp_path, llama(), learning_rate=0.0, eval_strategy="steps").state.log_history
        losses = [[row["eval_loss"] for row in rows if "eval_loss" in row] for rows in (found, plain)]
        assert losses[0] == losses[1]
        assert found[0]["loss"] > plain[0]["loss"]

    def test_a_loss_of_the_users_may_have_the_penalty_instead(self, tmp_path):
        """As the error says, with label smoothing and a model that is none of transformers."""
        model, loss = Plain(), nn.CrossEntropyLoss(label_smoothing=0.1)
        weight, features = model.head.weight.clone(), model.words(tokens(6)["input_ids"]).mean(dim=1)
        penalty = pf.FlatnessPenalty(model, "head", loss, probes=400)

        def penalised(outputs, labels, num_items_in_batch=None):
            risk = loss(outputs.logits, labels)
            return risk + 0.5 * penalty(outputs.logits, labels) if torch.is_grad_enabled() else risk

        trainer = self.trained(tmp_path, model, compute_loss_func=penalised, eval_strategy="steps")
        own, labels = Plain(), torch.arange(6) % 3
        total = loss(own.head(features), labels)
        total += 0.5 * pf.flatness_penalty(features, own.head.weight, own.head.bias, labels, loss=loss)
        assert trainer.state.log_history[0]["loss"] == pytest.approx(total.item(), rel=0.03)
        assert (model.head.weight - weight).abs().max() > 0
        assert "eval_loss" in trainer.state.log_history[1]

    def test_what_it_cannot_add_to_is_an_error(self, tmp_path):
        way_out = r"pass the trainer a compute_loss_func= that in training returns loss\(outputs.logits, labels\) \+ "
        for options, message in (
            ({"label_smoothing_factor": 0.1}, "this trainer has another by label_smoothing_factor=0.1"),
            ({"compute_loss_func": lambda *_, **__: None}, "this one was called without any, as by compute_loss_func="),
        ):
            model = llama()
            with pytest.raises(pf.errors.InputError, match=f"computes of its labels, and {message}; .*{way_out}"):
                self.trained(tmp_path, model, self.callback(HEAD, 0.1), **options)
        with pytest.raises(pf.errors.InputError, match=f"computes of its labels, and a Plain is none; .*{way_out}"):
            self.trained(tmp_path, Plain(), self.callback("head", 0.1))
        with pytest.raises(pf.errors.InputError, match="nothing in the model matches 'head'"):
            self.trained(tmp_path, llama(), self.callback("head", 0.1))
        with pytest.raises(pf.errors.InputError, match="strength=-1: a positive number is wanted"):
            self.callback(HEAD, -1)
